"""vLLM's functions, on every device, for its CPU engine and for vLLM-Kunlun: recorded signatures,
float64 oracles, what is refused."""

import inspect

import pytest
import torch
from common import assert_close, make_pool, make_qkv
from engines import (
    HV,
    SIGNATURES,
    SLACK,
    C,
    H,
    K,
    P,
    V,
    W,
    conv_pool,
    layer,
    qkv,
    refusals_that_write_nothing,
)

from gdn_ops import reference
from gdn_ops.compat import vllm, vllm_cpu, vllm_kunlun


def ours_for(label: str):
    return vllm_kunlun if "kunlun" in label else vllm


def rows(indices):
    """Indices as the ops mean them: vLLM's null block 0 is padding."""
    return torch.where(indices > 0, indices, -1)


# --- signatures


def recorded():
    for label, functions in SIGNATURES.items():
        for where, parameters in functions.items() if label.startswith("vllm") else ():
            yield pytest.param(label, where, parameters, id=f"{label.split()[1]}-{where}")


@pytest.mark.parametrize("label, where, parameters", list(recorded()))
def test_signature(label, where, parameters):
    name = where.split(":")[1]
    source = vllm_cpu if name.endswith("_cpu") or name.endswith("_pack") else ours_for(label)
    mine = inspect.signature(getattr(source, name)).parameters
    theirs = [p.split("=")[0] for p in parameters]
    if "is_vnni" in theirs:  # older CPU engines: the plug-in refuses them by that name
        assert label in ("vllm 0.22.1", "vllm 0.29.0") and "is_vnni" not in mine
        return
    assert set(theirs) <= set(mine), f"{where} of {label}: {set(theirs) - set(mine)}"
    # Calls pass q, k, v, ... by position; the rest of an older version only by keyword.
    if label == "vllm 0.33.0" or "kunlun" in label:
        positional = [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == theirs
    known = {"PAD_SLOT_ID": -1, "NULL_BLOCK_ID": 0}
    for parameter in parameters:
        argument, _, default = parameter.partition("=")
        if not default:
            assert mine[argument].default in (inspect.Parameter.empty, None, -1)
        elif (name, argument) != ("chunk_gated_delta_rule_cpu", "eps"):  # 1e-6 is the model's
            expected = known[default] if default in known else eval(default)
            assert mine[argument].default == expected, argument


def test_every_function_is_recorded():
    names = {w.split(":")[1] for functions in SIGNATURES.values() for w in functions}
    for source in (vllm, vllm_cpu, vllm_kunlun):
        for name in source.__all__:
            assert name in names or name.isupper(), name


# --- recurrence


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_decode(state, gated):
    """One token a sequence; null block, negative row, and indices of a longer padded batch."""
    N = 5
    q, k, v, g, beta = (x.transpose(0, 1) for x in qkv(N))
    indices = torch.tensor([3, 0, 6, -1, 1, 0, 0], dtype=torch.int32)
    pool = make_pool(P, HV, V, K, state)
    pool[0] = float("nan")  # nobody may read the null block
    before = pool.clone()
    kwargs = dict(initial_state=pool, cu_seqlens=torch.arange(N + 1, dtype=torch.int32),
                  ssm_state_indices=indices, use_qk_l2norm_in_kernel=True, scale=0.3)  # fmt: skip
    flat = [x.transpose(0, 1) for x in (q, k, v, g, beta)]
    if gated:
        m = layer(N)
        gates = (m["A_log"], m["a"], m["b"], m["dt_bias"])
        o, final = vllm.fused_sigmoid_gating_delta_rule_update(*gates, *flat[:3], **kwargs)
        g, beta = reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
        g, beta = g[:, None], beta[:, None]
    else:
        o, final = vllm.fused_recurrent_gated_delta_rule(*flat, **kwargs)
    assert final is pool
    expected, states = reference.recurrent(
        q, k, v, g, beta, before, rows(indices[:N]), scale=0.3, qk_l2norm=True
    )
    assert_close("o", o, expected.transpose(0, 1), torch.float32, SLACK)
    live = [3, 6, 1]
    assert_close("state", pool[live], states[live], state, SLACK if state is torch.float32 else 1.0)
    rest = [r for r in range(P) if r not in live]
    assert torch.equal(pool[rest].nan_to_num(), before[rest].nan_to_num())
    assert torch.equal(o[:, [1, 3]], torch.zeros_like(o[:, [1, 3]]))


def test_decode_without_offsets_or_indices():
    q, k, v, g, beta = make_qkv(3, 1, H, HV, K, V)
    pool = make_pool(P, HV, V, K)
    before = pool.clone()
    o, _ = vllm.fused_recurrent_gated_delta_rule(q, k, v, g, initial_state=pool)
    expected, states = reference.recurrent(q, k, v, g, torch.ones_like(g), before)
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, torch.float32, SLACK)
    a = torch.randn(3, HV)
    args = (torch.zeros(HV), a, a, torch.zeros(HV), q, k, v)
    pool = before.clone()
    o, _ = vllm.fused_sigmoid_gating_delta_rule_update(*args, initial_state=pool)
    gates = reference.gating(a[:, None], a[:, None], torch.zeros(HV), torch.zeros(HV))
    assert_close("o", o, reference.recurrent(q, k, v, *gates, before)[0], torch.float32, SLACK)


@pytest.mark.parametrize("gated", [False, True])
def test_speculative(gated):
    """2-D rows, accepted counts longer than the batch, a null column, an accepted count of 0."""
    lengths, S = [3, 2, 3, 1], 3
    indices = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0], [0, 0, 0], [0, 0, 0]])
    accepted = torch.tensor([2, 1, 0, 1, 1, 1, 9], dtype=torch.int32)
    cu = torch.tensor([0, 3, 5, 8, 9], dtype=torch.int32)
    q, k, v, g, beta = qkv(sum(lengths))
    pool = make_pool(P, HV, V, K)
    before = pool.clone()
    assert indices.shape[1] == S
    kwargs = dict(initial_state=pool, cu_seqlens=cu, ssm_state_indices=indices,
                  num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True)  # fmt: skip
    if gated:
        m = layer(sum(lengths))
        gates = (m["A_log"], m["a"], m["b"], m["dt_bias"])
        o, _ = vllm.fused_sigmoid_gating_delta_rule_update(*gates, q, k, v, **kwargs)
        g, beta = (
            x[None] for x in reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
        )  # fmt: skip
    else:
        o, _ = vllm.fused_recurrent_gated_delta_rule(q, k, v, g, beta, **kwargs)
    expected, states = reference.recurrent(
        q, k, v, g, beta, before, rows(indices[:4]), None, cu, accepted, None, True
    )
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, torch.float32, SLACK)
    assert torch.equal(pool[[0, 5, 6]], before[[0, 5, 6]])
    assert not torch.equal(pool[1], before[1]) and not torch.equal(pool[4], before[4])


@pytest.mark.parametrize("packed", [False, True])
def test_states_of_every_token(packed):
    """inplace_final_state=False: the pool stays, the state after each token comes back."""
    pool = make_pool(P, HV, V, K, torch.bfloat16)
    before = pool.clone()
    if packed:
        q, k, v, g, beta = qkv(6)
        cu = torch.tensor([0, 2, 2, 5, 6])
        spans = [(0, 0, 2), (2, 2, 5)]
        indices = torch.tensor([[4, 2], [3, 1], [5, 6], [0, 0]])
        accepted = torch.tensor([2, 1, 1, 1])
        start_rows = {0: 2, 2: 5}
    else:
        q, k, v, g, beta = make_qkv(3, 2, H, HV, K, V)
        cu, accepted = None, None
        spans = [(0, 0, 2), (2, 4, 6)]
        indices = torch.tensor([4, 0, 5])
        start_rows = {0: 4, 2: 5}
    o, states = vllm.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, 0.5, pool, False, cu, indices, accepted, True
    )
    assert torch.equal(pool, before) and states.dtype == torch.bfloat16
    assert states.shape == (6, HV, V, K) and o.shape == v.shape
    flat = [x.reshape(1, 6, *x.shape[2:]) for x in (q, k, v, g, beta)]
    live = []
    for n, start, end in spans:
        S = before[start_rows[n]][None].double()
        for t in range(start, end):
            token = [x[:, t : t + 1] for x in flat]
            expected, S = reference.recurrent(*token, S, scale=0.5, qk_l2norm=True)
            assert_close("o", o.reshape(1, 6, HV, V)[:, t : t + 1], expected, torch.float32, SLACK)
            assert_close("state", states[t], S[0], torch.bfloat16)
            live.append(t)
    dead = [t for t in range(6) if t not in live]
    assert dead and not states[dead].any() and not o.reshape(6, HV, V)[dead].any()


def test_states_of_every_token_without_a_pool():
    q, k, v, g, beta = qkv(3)
    o, states = vllm.fused_recurrent_gated_delta_rule(q, k, v, g, beta, inplace_final_state=False)
    expected, final = reference.chunk(q, k, v, g, beta)
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", states[2:], final, torch.float32, SLACK)
    m = layer(3)
    gates = (m["A_log"], m["a"], m["b"], m["dt_bias"])
    o, states = vllm.fused_sigmoid_gating_delta_rule_update(
        *gates, q, k, v, inplace_final_state=False
    )
    g, beta = (x[None] for x in reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"]))
    assert_close("o", o, reference.chunk(q, k, v, g, beta)[0], torch.float32, SLACK)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("by", ["index", "count"])
def test_states_of_every_token_of_padding_are_zero(by, pool):
    q, k, v, g, beta = make_qkv(3, 2, H, HV, K, V)
    padding = (
        {"ssm_state_indices": torch.tensor([4, -1, 5])}
        if by == "index"
        else {"num_accepted_tokens": torch.tensor([1, 0, 2])}
    )
    initial = make_pool(P, HV, V, K) if pool else None
    o, states = vllm.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, None, initial, False, **padding
    )
    assert not o[1].any() and not states[2:4].any()
    rows = torch.tensor([4, 1, 5]) if by == "index" else torch.arange(3)
    start = torch.zeros(3, HV, V, K) if initial is None else initial[rows]
    expected, final = reference.chunk(q, k, v, g, beta, start)
    assert_close("o", o[[0, 2]], expected[[0, 2]], torch.float32, SLACK)
    assert_close("state", states[[1, 5]], final[[0, 2]], torch.float32, SLACK)


def test_states_of_every_token_names_what_is_too_short():
    q, k, v, g, beta = make_qkv(3, 2, H, HV, K, V)
    for initial, indices, message in (
        (make_pool(2, HV, V, K), None, "initial_state: expected 3 rows or more, got shape"),
        (make_pool(P, HV, V, K), torch.tensor([1, 2]), "ssm_state_indices: expected 3 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            vllm.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta, None, initial, False, ssm_state_indices=indices
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_decode(dtype):
    m = layer(4, dtype)
    wide = torch.randn(4, C + 5).to(dtype)
    wide[:, 2 : 2 + C] = m["x"]
    mixed = wide[:, 2 : 2 + C]  # a slice of a wider projection
    pool = make_pool(P, HV, V, K)
    before = pool.clone()
    indices = torch.tensor([2, 0, 5, 1], dtype=torch.int32)
    out = torch.full((4, 1, HV, V), 7.0, dtype=dtype)
    got = vllm.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, m["a"], m["b"], m["A_log"], m["dt_bias"], 0.25, pool, out, indices, True
    )
    assert got[0] is out and got[1] is pool
    q, k, v = m["x"].split([H * K, H * K, HV * V], dim=1)
    g, beta = reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
    expected, states = reference.recurrent(
        q.view(4, 1, H, K), k.view(4, 1, H, K), v.view(4, 1, HV, V), g[:, None], beta[:, None],
        before, rows(indices), scale=0.25, qk_l2norm=True,
    )  # fmt: skip
    assert_close("o", out, expected, dtype, SLACK if dtype is torch.float32 else 1.0)
    assert_close("state", pool, states, torch.float32, SLACK)
    with pytest.raises(RuntimeError, match="mixed_qkv"):
        vllm.fused_recurrent_gated_delta_rule_packed_decode(
            mixed[:, 1:], m["a"], m["b"], m["A_log"], m["dt_bias"], 1.0, pool, out, indices
        )


def test_recurrence_refuses_by_name():
    q, k, v, g, beta = qkv(2)
    m = layer(2)
    gates = (m["A_log"], m["a"], m["b"], m["dt_bias"], q, k, v)
    gated = vllm.fused_sigmoid_gating_delta_rule_update
    pool = make_pool(P, HV, V, K)
    for keyword in ({"beta": 2.0}, {"threshold": 10.0}, {"is_kda": True}):
        with pytest.raises(NotImplementedError, match=next(iter(keyword))):
            gated(*gates, initial_state=pool, **keyword)
    for f, args in ((gated, gates), (vllm.fused_recurrent_gated_delta_rule, (q, k, v, g, beta))):
        with pytest.raises(ValueError, match="initial_state"):
            f(*args)


# --- chunks


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_chunk(state):
    q, k, v, g, beta = qkv(70)
    cu = torch.tensor([0, 67, 70], dtype=torch.int32)
    S = make_pool(2, HV, V, K, state)
    buffer = torch.zeros(75, HV, V)
    o, final = vllm.chunk_gated_delta_rule(
        q, k, v, g, beta, 0.4, S, True, cu, "not read", "not read", True, buffer
    )
    expected, states = reference.chunk(q, k, v, g, beta, S, cu, 0.4, True)
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", final, states, torch.float32, SLACK)
    assert o.data_ptr() == buffer.data_ptr() and torch.equal(buffer[:70], o[0])
    assert not buffer[70:].any()
    o2, none = vllm.chunk_gated_delta_rule(q, k, v, g, beta, head_first=False)
    assert none is None
    assert_close("o", o2, reference.chunk(q, k, v, g, beta)[0], torch.float32, SLACK)
    with pytest.raises(NotImplementedError, match="head_first"):
        vllm.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)
    with pytest.raises(ValueError, match="core_attn_out: .* on cpu .* on meta"):
        vllm.chunk_gated_delta_rule(q, k, v, g, beta, core_attn_out=buffer.to("meta"))


def test_gates():
    m = layer(5, torch.bfloat16)
    gates = (m["A_log"], m["a"], m["b"], m["dt_bias"])
    g, beta = vllm.fused_gdn_gating(*gates)
    expected = reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
    assert g.dtype == beta.dtype == torch.float32
    assert_close("g", g, expected[0][None])
    assert_close("beta", beta, expected[1][None])
    alone = vllm_kunlun.fused_gdn_gating(m["A_log"], m["a"], m["dt_bias"])
    assert torch.equal(alone, g[0])
    for f, args in (
        (vllm.fused_gdn_gating, gates),
        (vllm_kunlun.fused_gdn_gating, (m["A_log"], m["a"], m["dt_bias"])),
    ):
        with pytest.raises(NotImplementedError, match="threshold"):
            f(*args, threshold=1.0)


@pytest.mark.parametrize("l2norm", [True, False])
def test_post_conv_prep(l2norm):
    m = layer(5, torch.bfloat16)
    args = (m["x"], m["a"], m["b"], m["A_log"], m["dt_bias"], H, K, V)
    q, k, v, g, beta = vllm.fused_post_conv_prep(*args, l2norm, output_g_exp=l2norm)
    parts = m["x"].double().split([H * K, H * K, HV * V], dim=1)
    eq, ek = (p.view(5, H, K) for p in parts[:2])
    if l2norm:
        eq, ek = reference.l2norm(eq), reference.l2norm(ek)
    eg, ebeta = reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
    for name, got, expected in (
        ("q", q, eq), ("k", k, ek), ("v", v, parts[2].view(5, HV, V)),
        ("g", g, eg.exp() if l2norm else eg), ("beta", beta, ebeta),
    ):  # fmt: skip
        assert got.is_contiguous()
        assert_close(name, got, expected)
    with pytest.raises(ValueError, match="conv_output"):
        vllm.fused_post_conv_prep(m["x"][:, 1:], *args[1:])


# --- convolution


@pytest.mark.parametrize("activation", ["silu", "swish", True, None, False])
@pytest.mark.parametrize("null, pad", [(0, -1), (None, -1), (4, 2)])
def test_conv_fn(activation, null, pad):
    m = layer(9)
    cu = torch.tensor([0, 4, 5, 5, 7, 9], dtype=torch.int32)
    indices = torch.tensor([3, 4, 5, -1 if pad == -1 else 2, 6, 0], dtype=torch.int32)
    if null == 0:
        indices[1] = 0
    has = torch.tensor([True, True, True, True, False])
    pool = conv_pool(5)
    before = pool.clone()
    pool[6] = float("nan")  # a sequence without history reads no row
    y = vllm.causal_conv1d_fn(
        m["x"].t(), m["weight"], m["bias"], pool, cu, indices, has, activation, pad, null,
        metadata=object(), validate_data=True,
    )  # fmt: skip
    skipped = {0: (0,), None: (), 4: (4, 2)}[null] + ((pad,) if pad >= 0 else ())
    mapped = torch.tensor([-1 if int(i) in skipped else int(i) for i in indices[:5]])
    expected, states = reference.short_conv(
        m["x"][None], m["weight"], m["bias"], before, mapped, has, cu, None,
        "silu" if activation else "none", True,
    )  # fmt: skip
    assert_close("y", y, expected[0].t())
    assert_close("state", pool.nan_to_num(), states.where(~pool.isnan(), 0.0))
    assert y.shape == (C, 9) and not pool[6, :, : W - 1].isnan().any()


def test_conv_fn_without_flags_starts_every_sequence_anew():
    m = layer(5)
    pool = torch.full((P, W - 1, C), float("nan")).transpose(1, 2)
    cu = torch.tensor([0, 3, 5])
    y = vllm.causal_conv1d_fn(m["x"].t(), m["weight"], None, pool, cu)
    expected, _ = reference.conv1d(m["x"][None], m["weight"], None, None, cu)
    assert_close("y", y, expected[0].t())
    assert not pool[:2].isnan().any() and pool[2:].isnan().all()


def test_conv_fn_refuses_by_name():
    m = layer(2)
    args = (m["x"].t(), m["weight"], None, conv_pool(3), torch.tensor([0, 2]))
    one = torch.zeros(1, dtype=torch.int32)
    before = args[3].clone()
    for keyword in (
        {"block_idx_first_scheduled_token": one}, {"block_idx_last_scheduled_token": one},
        {"initial_state_idx": one}, {"num_computed_tokens": one}, {"block_size_to_align": 16},
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=next(iter(keyword))):
            vllm.causal_conv1d_fn(*args, **keyword)
    with pytest.raises(ValueError, match="activation"):
        vllm.causal_conv1d_fn(*args, activation="gelu")
    assert torch.equal(args[3], before)


@pytest.mark.parametrize("form", ["one", "several", "packed"])
@pytest.mark.parametrize("into_out", [False, True])
def test_conv_update(form, into_out):
    m = layer(6)
    indices = torch.tensor([4, 0, 2, 0, 0], dtype=torch.int32)
    pool = conv_pool(5)
    before = pool.clone()
    kwargs = {}
    if form == "one":
        x = m["x"][:3]
        wide = x[:, None]
    elif form == "several":
        wide = m["x"].view(3, 2, C)
        x = wide.transpose(1, 2)
    else:
        x, wide = m["x"], m["x"][None]
        kwargs = {"query_start_loc": torch.tensor([0, 3, 4, 6]), "max_query_len": 3}
    kept, out = x.clone(), torch.zeros_like(x)
    y = vllm.causal_conv1d_update(
        x, pool, m["weight"], m["bias"], "silu", conv_state_indices=indices, validate_data=True,
        out=out if into_out else None, **kwargs,
    )  # fmt: skip
    expected, states = reference.short_conv(
        wide, m["weight"], m["bias"], before, rows(indices[:3]), None,
        kwargs.get("query_start_loc"), None, "silu", True,
    )  # fmt: skip
    expected = {"one": expected.squeeze(1), "several": expected.transpose(1, 2)}.get(
        form, expected[0]
    )
    assert_close("y", y, expected)
    assert_close("state", pool, states)
    assert torch.equal(x, kept) and y.shape == x.shape
    assert (y is out) == into_out
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_conv_update_speculative():
    """The history starts at the accepted count; drafts follow it (vLLM's layout)."""
    m = layer(7)
    pool = conv_pool(W - 1 + 2)
    before = pool.clone()
    indices = torch.tensor([[3, 5], [6, 1], [0, 0], [0, 0]], dtype=torch.int32)
    accepted = torch.tensor([3, 1, 1, 1, 1], dtype=torch.int32)
    cu = torch.tensor([0, 3, 5, 7, 7], dtype=torch.int32)
    y = vllm.causal_conv1d_update(
        m["x"], pool, m["weight"], m["bias"], "silu", indices, accepted, cu, 3
    )
    expected, states = reference.short_conv(
        m["x"][None], m["weight"], m["bias"], before, rows(indices[:, 0]), None, cu, accepted,
        "silu", True,
    )  # fmt: skip
    assert_close("y", y, expected[0])
    assert_close("state", pool, states)
    assert torch.equal(pool[5], before[5])
    # More offsets than indices: the surplus ones are of no sequence.
    again = before.clone()
    y2 = vllm.causal_conv1d_update(
        m["x"][:5], again, m["weight"], m["bias"], "silu", indices[:2], accepted, cu, 3
    )
    assert torch.equal(y2, y[:5])


def test_conv_update_refuses_by_name():
    m, one = layer(2), torch.zeros(2, dtype=torch.int32)
    pool = conv_pool(3)
    before = pool.clone()
    names = ("block_idx_last_scheduled_token", "initial_state_idx", "cache_seqlens")
    for name in names:
        with pytest.raises(NotImplementedError, match=name):
            vllm.causal_conv1d_update(m["x"], pool, m["weight"], **{name: one})
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        vllm_kunlun.causal_conv1d_update(m["x"], pool, m["weight"], cache_seqlens=one)
    with pytest.raises(ValueError, match="activation"):
        vllm.causal_conv1d_update(m["x"], pool, m["weight"], activation="relu")
    assert torch.equal(pool, before)


# --- vLLM's CPU engine


def test_cpu_functions():
    """The pool is [blocks, HV, K, V] there, and row 0 a row like any other."""
    pool = make_pool(P, HV, K, V)
    before = pool.clone()
    m = layer(3)
    q, k, v, g, beta = qkv(3)
    gates = reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])
    got = vllm_cpu.fused_gdn_gating_cpu(m["A_log"], m["a"], m["b"], m["dt_bias"])
    assert_close("g", got[0], gates[0][None])
    assert_close("beta", got[1], gates[1][None])
    eg, ebeta = (x[None] for x in gates)

    indices = torch.tensor([4, -1, 0], dtype=torch.int32)
    args = (m["A_log"], m["dt_bias"], q, k, v, m["a"], m["b"], pool)
    cu = torch.arange(4, dtype=torch.int32)
    o = vllm_cpu.fused_sigmoid_gating_delta_rule_update_cpu(*args, indices, cu, True)
    assert o.shape == (3, 1, HV, V)
    expected, states = reference.recurrent(
        q, k, v, eg, ebeta, before.transpose(2, 3), indices, None, cu, qk_l2norm=True
    )
    assert_close("o", o.transpose(0, 1), expected, torch.float32, SLACK)
    assert_close("state", pool.transpose(2, 3), states, torch.float32, SLACK)

    pool.copy_(before)
    table, accepted = torch.tensor([[1, 2], [3, 5]]), torch.tensor([2, 1])
    cu = torch.tensor([0, 2, 3])
    o = vllm_cpu.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        m["A_log"], m["dt_bias"], q[0], k[0], v[0], m["a"], m["b"], pool, table, accepted, cu, True
    )
    expected, states = reference.recurrent(
        q, k, v, eg, ebeta, before.transpose(2, 3), table, None, cu, accepted, qk_l2norm=True
    )
    assert_close("o", o, expected[0], torch.float32, SLACK)
    assert_close("state", pool.transpose(2, 3), states, torch.float32, SLACK)

    pool.copy_(before)
    args = (q, k, v, g, beta, pool, True, cu, False, True, torch.tensor([6, 0]))
    o, final = vllm_cpu.chunk_gated_delta_rule_cpu(*args)
    expected, states = reference.chunk_prefill(
        q, k, v, g, beta, before.transpose(2, 3), torch.tensor([6, 0]), None, None, cu,
        qk_l2norm=True,
    )  # fmt: skip
    assert final is pool
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool.transpose(2, 3), states, torch.float32, SLACK)

    for position, value, name in ((8, True, "head_first"), (11, 1e-5, "eps")):
        wrong = [*args, 1e-6]
        wrong[position] = value
        with pytest.raises(NotImplementedError, match=name):
            vllm_cpu.chunk_gated_delta_rule_cpu(*wrong)


def test_cpu_convolution_and_its_packed_weights():
    m = layer(4)
    pool = conv_pool(W - 1)
    before = pool.clone()
    plain = vllm_cpu.causal_conv1d_weight_pack(m["weight"])
    assert torch.equal(plain, m["weight"])
    indices, cu = torch.tensor([5, 0], dtype=torch.int32), torch.tensor([0, 3, 4])
    has = torch.tensor([False, True])
    y = vllm_cpu.causal_conv1d_fwd_cpu(
        m["x"].t(), plain[:, None], m["bias"], pool, cu, indices, has, True, True
    )
    expected, states = reference.short_conv(
        m["x"][None], m["weight"], m["bias"], before, indices, has, cu, None, "silu", True
    )
    assert_close("y", y, expected[0].t())
    assert_close("state", pool, states)

    for x, accepted in ((m["x"][:2], None), (m["x"].view(2, 2, C), torch.tensor([2, 1]))):
        wide_pool = conv_pool(W - 1 if accepted is None else W)
        copy = wide_pool.clone()
        y = vllm_cpu.causal_conv1d_update_cpu(
            x, wide_pool, plain, None, False, indices, True, accepted
        )
        expected, states = reference.short_conv(
            x if x.dim() == 3 else x[:, None], m["weight"], None, copy, indices, None, None,
            accepted, "none", True,
        )  # fmt: skip
        assert_close("y", y, expected.view(x.shape))
        assert_close("state", wide_pool, states)

    foreign = m["weight"].clone()
    args = (m["x"][:2], pool, foreign, None, False, indices)
    with pytest.raises(ValueError, match="is_weight_packed"):
        vllm_cpu.causal_conv1d_update_cpu(*args, True)
    vllm_cpu.causal_conv1d_update_cpu(*args, False)
    # Taken out again, the weights of loaded models are packed as vLLM packs them.
    vllm_cpu.repack_weights(lambda w: w.flip(1))
    assert torch.equal(plain, m["weight"].flip(1))
    with pytest.raises(ValueError, match="is_weight_packed"):
        vllm_cpu.causal_conv1d_update_cpu(m["x"][:2], pool, plain, None, False, indices, True)
    for missing in ("conv_states", "query_start_loc"):
        kwargs = {"conv_states": pool, "query_start_loc": cu} | {missing: None}
        with pytest.raises(ValueError, match=missing):
            vllm_cpu.causal_conv1d_fwd_cpu(
                m["x"].t(), foreign, None, cache_indices=indices, has_initial_state=None,
                silu_activation=True, is_weight_packed=False, **kwargs,
            )  # fmt: skip


# --- what engines should not pass, and what they may


def packed_decode(m, pool, indices, out=None):
    N = m["x"].shape[0]
    out = torch.empty(N, 1, HV, V, dtype=m["x"].dtype) if out is None else out
    vllm.fused_recurrent_gated_delta_rule_packed_decode(
        m["x"], m["a"], m["b"], m["A_log"], m["dt_bias"], 0.5, pool, out, indices
    )
    return out


@pytest.mark.parametrize("kind", ["integers", "complex", "expanded"])
def test_unfit_out_is_refused_before_the_state_is_written(kind):
    def unfit(*shape):
        if kind == "expanded":
            return torch.empty(1, *shape[1:]).expand(shape)
        return torch.empty(shape, dtype=torch.int32 if kind == "integers" else torch.complex64)

    m, indices = layer(3), torch.tensor([3, 1, 5])
    for pool, call in (
        (make_pool(P, HV, V, K), lambda S: packed_decode(m, S, indices, unfit(3, 1, HV, V))),
        (
            conv_pool(3),
            lambda S: vllm.causal_conv1d_update(
                m["x"], S, m["weight"], conv_state_indices=indices, out=unfit(3, C)
            ),
        ),
    ):
        before = pool.clone()
        with pytest.raises((RuntimeError, ValueError), match="out: "):
            call(pool)
        assert torch.equal(pool, before)
    if kind != "expanded":
        q, k, v, g, beta = qkv(3)
        with pytest.raises(ValueError, match="core_attn_out: expected a floating dtype"):
            vllm.chunk_gated_delta_rule(q, k, v, g, beta, core_attn_out=unfit(1, 3, HV, V))
        with pytest.raises(ValueError, match="core_attn_out: .* elements or more, got"):
            vllm.chunk_gated_delta_rule(q, k, v, g, beta, core_attn_out=torch.empty(2, HV, V))


def test_errors_count_blocks_as_the_engine_does():
    m, pool, conv = layer(3), make_pool(P, HV, V, K), conv_pool(3)
    kept = pool.clone(), conv.clone()
    q, k, v, g, beta = qkv(3)
    cu = torch.tensor([0, 1, 2, 3])
    for block in (P, 2**40):
        indices = torch.tensor([3, 1, block])
        for call in (
            lambda i: packed_decode(m, pool, i),
            lambda i: vllm.fused_recurrent_gated_delta_rule(
                q, k, v, g, beta, None, pool, True, cu, i
            ),
            lambda i: vllm.causal_conv1d_update(m["x"], conv, m["weight"], conv_state_indices=i),
        ):
            message = f"expected blocks below {P}, got {block} for sequence 2"
            with pytest.raises(RuntimeError, match=message):
                call(indices)
            with pytest.raises(RuntimeError, match="state_indices: expected int32 or int64"):
                call(torch.tensor([True, False, True]))
    assert torch.equal(pool, kept[0]) and torch.equal(conv, kept[1])


def test_offsets_without_an_entry_are_refused_by_name():
    q, k, v, g, beta = qkv(0)
    m, none = layer(0), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens: expected shape"):
        vllm.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, None, make_pool(P, HV, V, K), True, none, none
        )
    with pytest.raises(RuntimeError, match="cu_seqlens: expected shape"):
        vllm.causal_conv1d_fn(m["x"].t(), m["weight"], None, conv_pool(3), none, none)


def test_nothing_to_do_is_done():
    """Batches without sequences and sequences without tokens, by the paths without indices."""
    m, pool, conv = layer(0), make_pool(P, HV, V, K), conv_pool(3)
    kept = pool.clone(), conv.clone()
    assert vllm.causal_conv1d_update(m["x"], conv, m["weight"]).shape == (0, C)
    y = vllm.causal_conv1d_update(torch.empty(3, C, 0), conv, m["weight"])
    assert y.shape == (3, C, 0)
    q, k, v, g, beta = make_qkv(3, 0, H, HV, K, V)
    o, states = vllm.fused_recurrent_gated_delta_rule(q, k, v, g, beta, None, pool, False)
    assert o.shape == (3, 0, HV, V) and states.shape == (0, HV, V, K)
    assert torch.equal(pool, kept[0]) and torch.equal(conv, kept[1])


def test_no_padding_slot_is_no_slot():
    """pad_slot_id=None: negative rows and block 0 are padding, as without it."""
    m, indices, has = layer(6), torch.tensor([3, 0, -1]), torch.ones(3, dtype=torch.bool)
    cu = torch.tensor([0, 3, 5, 6])
    for source, x, turn in ((vllm, m["x"].t(), False), (vllm_kunlun, m["x"], True)):
        results = []
        for kwargs in ({}, {"pad_slot_id": None}):
            pool = conv_pool(3)
            states = pool.transpose(1, 2) if turn else pool
            given = {"conv_states": states, "query_start_loc": cu, "cache_indices": indices}
            y = source.causal_conv1d_fn(
                x, m["weight"], None, has_initial_state=has, **given, **kwargs
            )
            update = source.causal_conv1d_update(
                m["x"][:3], states, m["weight"], conv_state_indices=indices, **kwargs
            )
            results.append((y, update, pool))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- vLLM-Kunlun


def test_kunlun_layouts():
    """Tokens first, convolution states [blocks, L, C], chunked states [N, HV, K, V]."""
    m = layer(6)
    pool = conv_pool(4)
    before = pool.clone()
    indices, cu = torch.tensor([3, 1, 0], dtype=torch.int32), torch.tensor([0, 3, 5, 6])
    has = torch.tensor([True, False, True])
    rows_last = pool.transpose(1, 2)
    assert rows_last.is_contiguous()
    y = vllm_kunlun.causal_conv1d_fn(
        m["x"], m["weight"], m["bias"], cu, cu, indices, indices, has, has, rows_last
    )
    expected, states = reference.short_conv(
        m["x"][None], m["weight"], m["bias"], before, rows(indices), has, cu, None, "silu", True
    )
    assert_close("y", y, expected[0])
    assert_close("state", pool, states)
    assert y.is_contiguous()
    for missing in ("query_start_loc", "conv_states"):
        kwargs = {"query_start_loc": cu, "conv_states": rows_last} | {missing: None}
        with pytest.raises(ValueError, match=missing):
            vllm_kunlun.causal_conv1d_fn(m["x"], m["weight"], **kwargs)

    pool.copy_(before)
    y = vllm_kunlun.causal_conv1d_update(
        m["x"][:3], rows_last, m["weight"], None, "silu", None, indices, indices
    )
    expected, states = reference.short_conv(
        m["x"][:3, None], m["weight"], None, before, rows(indices), None, None, None, "silu", True
    )
    assert_close("y", y, expected[:, 0])
    assert_close("state", pool, states)

    accepted = torch.tensor([2, 1, 1, 1])
    for kwargs in ({}, {"query_start_loc": torch.tensor([0, 2, 4, 6])}):
        pool.copy_(before)
        y = vllm_kunlun.causal_conv1d_update(
            m["x"], rows_last, m["weight"], None, "silu", None, indices, None, accepted,
            max_query_len=2, **kwargs,
        )  # fmt: skip
        expected, states = reference.short_conv(
            m["x"].view(3, 2, C), m["weight"], None, before, rows(indices), None, None, accepted,
            "silu", True,
        )  # fmt: skip
        assert_close("y", y, expected.view(6, C))
        assert_close("state", pool, states)
    with pytest.raises(ValueError, match="max_query_len"):
        vllm_kunlun.causal_conv1d_update(
            m["x"], rows_last, m["weight"], num_accepted_tokens=accepted, max_query_len=4
        )

    q, k, v, g, beta = qkv(6, torch.float16)
    S = make_pool(2, HV, K, V, torch.float16)
    cu, gathered = torch.tensor([0, 2, 6]), S.clone()
    o, final = vllm_kunlun.chunk_gated_delta_rule(q, k, v, g, beta, None, S, True, cu, False, True)
    expected, states = reference.chunk(q, k, v, g, beta, S.transpose(2, 3), cu, None, True)
    assert_close("o", o, expected)
    assert final.dtype == torch.float16 and final.shape == S.shape and final.is_contiguous()
    assert_close("state", final, states.transpose(2, 3))
    assert torch.equal(S, gathered)
    o, final = vllm_kunlun.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    expected, states = reference.chunk(q, k, v, g, beta)
    assert_close("o", o, expected)
    assert_close("state", final, states.transpose(2, 3))
    assert vllm_kunlun.chunk_gated_delta_rule(q, k, v, g, beta)[1] is None
    with pytest.raises(ValueError, match="initial_state: expected 1 states"):
        vllm_kunlun.chunk_gated_delta_rule(q, k, v, g, beta, None, S)
    with pytest.raises(NotImplementedError, match="head_first"):
        vllm_kunlun.chunk_gated_delta_rule(q, k, v, g, beta, head_first=True)


# --- invalid calls


def engine_calls():
    """(function, keywords) of calls that work, on fresh tensors."""
    q, k, v, g, beta = make_qkv(3, 1, H, HV, K, V)
    m = layer(3)
    gates = {n: m[n] for n in ("A_log", "a", "b", "dt_bias")}
    at = torch.tensor([3, 1, 5])
    cu = torch.tensor([0, 1, 2, 3])
    has = torch.tensor([True, False, True])
    conv = {"weight": m["weight"], "bias": m["bias"]}
    flat = {"q": q.reshape(1, 3, H, K), "k": k.reshape(1, 3, H, K),
            "v": v.reshape(1, 3, HV, V)}  # fmt: skip
    pool = {"initial_state": make_pool(P, HV, V, K)}
    kv_pool = make_pool(P, HV, K, V)
    yield vllm.fused_recurrent_gated_delta_rule, {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, **pool, "ssm_state_indices": at,
    }  # fmt: skip
    yield vllm.fused_sigmoid_gating_delta_rule_update, {
        **gates, "q": q, "k": k, "v": v, **pool, "ssm_state_indices": at,
    }  # fmt: skip
    yield vllm.fused_recurrent_gated_delta_rule_packed_decode, {
        "mixed_qkv": m["x"], **gates, "scale": 0.5, **pool, "out": torch.zeros(3, 1, HV, V),
        "ssm_state_indices": at,
    }  # fmt: skip
    yield vllm.causal_conv1d_fn, {
        "x": m["x"].t(), **conv, "conv_states": conv_pool(W), "query_start_loc": cu,
        "cache_indices": at, "has_initial_state": has,
    }  # fmt: skip
    yield vllm.causal_conv1d_update, {
        "x": m["x"], "conv_state": conv_pool(W), **conv, "conv_state_indices": at,
        "out": torch.zeros(3, C),
    }  # fmt: skip
    yield vllm_cpu.fused_sigmoid_gating_delta_rule_update_cpu, {
        **gates, **flat, "initial_state_source": kv_pool, "initial_state_indices": at,
        "cu_seqlens": cu, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    yield vllm_cpu.chunk_gated_delta_rule_cpu, {
        "query": flat["q"], "key": flat["k"], "value": flat["v"], "g": g.reshape(1, 3, HV),
        "beta": beta.reshape(1, 3, HV), "initial_state": make_pool(P, HV, K, V),
        "output_final_state": True, "cu_seqlens": cu, "head_first": False,
        "use_qk_l2norm_in_kernel": True, "initial_state_indices": at,
    }  # fmt: skip
    yield vllm_cpu.causal_conv1d_update_cpu, {
        "x": m["x"], "conv_states": conv_pool(W), **conv, "silu_activation": True,
        "conv_state_indices": at, "is_weight_packed": False,
    }  # fmt: skip
    yield vllm_cpu.causal_conv1d_fwd_cpu, {
        "x": m["x"].t(), **conv, "conv_states": conv_pool(W), "query_start_loc": cu,
        "cache_indices": at, "has_initial_state": has, "silu_activation": True,
        "is_weight_packed": False,
    }  # fmt: skip
    yield vllm_cpu.fused_sigmoid_gating_delta_rule_update_spec_cpu, {
        **gates, "q": q[:, 0], "k": k[:, 0], "v": v[:, 0], "initial_state_source": kv_pool,
        "spec_state_indices": at[:, None], "num_accepted_tokens": torch.ones_like(at),
        "cu_seqlens": cu, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    yield vllm_kunlun.causal_conv1d_update, {
        "x": m["x"], "conv_state": conv_pool(W).mT, **conv, "activation": "silu",
        "conv_state_indices": at,
    }  # fmt: skip
    yield vllm_kunlun.causal_conv1d_fn, {
        "x": m["x"], "conv_states": conv_pool(W).mT, **conv, "query_start_loc": cu,
        "cache_indices": at, "has_initial_state": has,
    }  # fmt: skip


def test_a_call_that_raises_has_written_nothing():
    assert refusals_that_write_nothing(engine_calls()) > 300
