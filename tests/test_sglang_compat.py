"""sglang's functions: recorded signatures, float64 oracles, what is refused."""

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
from gdn_ops.compat import plugin, sglang

LABEL = "sglang 0.5.23"
REPLACED = [
    pytest.param(module, name, ours, id=f"{module.removeprefix('sglang.')}:{name}")
    for module, functions in plugin._SGLANG.items()
    for name, ours in functions.items()
]


def gates_of(m):
    return reference.gating(m["a"], m["b"], m["A_log"], m["dt_bias"])


# --- signatures


@pytest.mark.parametrize("module, name, ours", REPLACED)
def test_signature(module, name, ours):
    path = module.removeprefix("sglang.").replace(".", "/") + ".py"
    mine = inspect.signature(ours).parameters
    recorded = SIGNATURES[LABEL][f"{path}:{name}"]
    theirs = [p.split("=")[0] for p in recorded]
    assert [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == theirs
    for parameter in recorded:
        argument, _, default = parameter.partition("=")
        if default:
            assert mine[argument].default == eval(default, {"PAD_SLOT_ID": -1}), argument
        else:
            assert mine[argument].default in (inspect.Parameter.empty, None), argument


def test_every_function_replaces_one():
    used = {ours for functions in plugin._SGLANG.values() for ours in functions.values()}
    functions = {getattr(sglang, name) for name in sglang.__all__}
    assert {f for f in functions if inspect.isfunction(f)} == used


# --- decode


def update(m, q, k, v, pool, indices, **keywords):
    """The call of sglang's backend."""
    return sglang.fused_sigmoid_gating_delta_rule_update(
        A_log=m["A_log"], dt_bias=m["dt_bias"], q=q, k=k, v=v, a=m["a"], b=m["b"],
        initial_state_source=pool, initial_state_indices=indices,
        **{"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0,
           **keywords},
    )  # fmt: skip


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16])
def test_decode(state):
    """One token a sequence; slot 0 is alive, indices of a longer padded batch."""
    N = 4
    q, k, v, _, _ = qkv(N)
    m = layer(N)
    cu = torch.arange(N + 1, dtype=torch.int32)
    indices = torch.tensor([3, 0, -1, 6, 2, 2], dtype=torch.int32)
    pool = make_pool(P, HV, V, K, state)
    before = pool.clone()
    o = update(m, q, k, v, pool, indices, cu_seqlens=cu, is_kda=False)
    g, beta = (x[None] for x in gates_of(m))
    expected, states = reference.recurrent(
        q, k, v, g, beta, before, indices[:N], None, cu, qk_l2norm=True
    )
    assert o.shape == v.shape and not o[:, 2].any()
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, state, SLACK if state is torch.float32 else 1.0)
    assert torch.equal(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]])


def test_several_tokens_in_both_forms():
    q, k, v, _, _ = qkv(6)
    m, pool, indices = layer(6), make_pool(P, HV, V, K), torch.tensor([5, 0])
    before = pool.clone()
    g, beta = (x[None] for x in gates_of(m))
    cu = torch.tensor([0, 4, 6])
    o = update(m, q, k, v, pool, indices, cu_seqlens=cu, scale=0.5)
    expected, states = reference.recurrent(
        q, k, v, g, beta, before, indices, None, cu, None, 0.5, True
    )
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, torch.float32, SLACK)
    pool.copy_(before)
    q, k, v = (x.view(2, 3, *x.shape[2:]) for x in (q, k, v))
    o = update(m, q, k, v, pool, indices)
    expected, states = reference.recurrent(
        q, k, v, g.view(2, 3, HV), beta.view(2, 3, HV), before, indices, qk_l2norm=True
    )
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, torch.float32, SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_decode(dtype):
    m = layer(4, dtype)
    pool = make_pool(P, HV, V, K)
    before = pool.clone()
    indices = torch.tensor([2, 0, -1, 1], dtype=torch.int32)
    out = torch.full((4, 1, HV, V), 7.0, dtype=dtype)
    got = sglang.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=m["x"], a=m["a"], b=m["b"], A_log=m["A_log"], dt_bias=m["dt_bias"],
        scale=K**-0.5, initial_state=pool, out=out, ssm_state_indices=indices,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert got[0] is out and got[1] is pool
    q, k, v = m["x"].split([H * K, H * K, HV * V], dim=1)
    g, beta = gates_of(m)
    expected, states = reference.recurrent(
        q.view(4, 1, H, K), k.view(4, 1, H, K), v.view(4, 1, HV, V), g[:, None], beta[:, None],
        before, indices, qk_l2norm=True,
    )  # fmt: skip
    assert_close("o", out, expected, dtype, SLACK if dtype is torch.float32 else 1.0)
    assert_close("state", pool, states, torch.float32, SLACK)
    assert torch.equal(pool[[3, 4, 5, 6]], before[[3, 4, 5, 6]])


def test_packed_decode_raises_before_writing():
    m, pool, out = layer(4), make_pool(P, HV, V, K), torch.zeros(4, 1, HV, V)
    before = pool.clone()
    args = (m["x"], m["a"], m["b"], m["A_log"], m["dt_bias"], 1.0, pool, out)
    with pytest.raises(RuntimeError, match=f"expected rows below P = {P}, got {P}"):
        sglang.fused_recurrent_gated_delta_rule_packed_decode(*args, torch.tensor([1, -1, 0, P]))
    assert torch.equal(pool, before) and not out.any()


def test_gates():
    m = layer(5, torch.bfloat16)
    g, beta = sglang.fused_gdn_gating(m["A_log"], m["a"], m["b"], m["dt_bias"])
    assert g.shape == beta.shape == (1, 5, HV) and g.dtype == beta.dtype == torch.float32
    for name, got, expected in zip(("g", "beta"), (g, beta), gates_of(m), strict=True):
        assert_close(name, got[0], expected)


# --- verification of drafts


def verify(m, q, k, v, pool, indices, buffer, at, **keywords):
    return update(
        m, q, k, v, pool, indices, disable_state_update=True, intermediate_states_buffer=buffer,
        intermediate_state_indices=at, **{"cache_steps": 3, "retrieve_parent_token": None,
        "is_kda": False, **keywords},
    )  # fmt: skip


@pytest.mark.parametrize("steps, capacity", [(3, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_verification(steps, capacity, state):
    """The pool stays, the buffer has the state after each token; its steps may be a slice."""
    T, indices = 3, torch.tensor([4, -1, 0, 6, 6], dtype=torch.int32)
    at, live = torch.tensor([2, 1, 0, 3, 3], dtype=torch.int32), [0, 2]
    q, k, v, _, _ = qkv(3 * T)
    m, cu = layer(3 * T), torch.arange(4) * T
    pool = make_pool(P, HV, V, K, state)
    before = pool.clone()
    whole = torch.full((4, capacity, HV, V, K), 9.0, dtype=state)
    o = verify(m, q, k, v, pool, indices, whole[:, :steps], at, cu_seqlens=cu)
    g, beta = (x[None] for x in gates_of(m))
    for n in live:
        S = before[indices[n]][None].double()
        for t in range(T):
            token = [x[:, n * T + t][:, None] for x in (q, k, v, g, beta)]
            expected, S = reference.recurrent(*token, S, qk_l2norm=True)
            assert_close("o", o[:, n * T + t][:, None], expected, torch.float32, SLACK)
            slack = SLACK if state is torch.float32 else 1.0
            assert_close("state", whole[at[n], t], S[0], state, slack)
    assert not o[:, T : 2 * T].any()
    assert torch.equal(pool, before)
    assert (whole[[1, 3]] == 9).all() and (whole[:, T:] == 9).all()


def test_verification_of_padding_alone():
    q, k, v, _, _ = qkv(4)
    m, none, cu = layer(4), torch.tensor([-1, -1]), torch.tensor([0, 2, 4])
    pool, buffer = make_pool(P, HV, V, K), torch.full((2, 2, HV, V, K), 9.0)
    before = pool.clone()
    for at in (torch.tensor([0, 1]), torch.tensor([1, 1]), none):
        o = verify(m, q, k, v, pool, none, buffer, at, cu_seqlens=cu)
        assert not o.any() and (buffer == 9).all() and torch.equal(pool, before)
    empty = torch.zeros(0, dtype=torch.int32)
    nobody = {n: x[:0] if x.shape[0] == 4 else x for n, x in m.items()}
    o = verify(nobody, q[:, :0], k[:, :0], v[:, :0], pool, empty, buffer, empty,
               cu_seqlens=torch.zeros(1, dtype=torch.int32))  # fmt: skip
    assert o.shape == (1, 0, HV, V) and (buffer == 9).all()


def test_verification_is_compiled_whole():
    q, k, v, _, _ = qkv(4)
    m, indices, at = layer(4), torch.tensor([3, -1]), torch.tensor([1, 0])
    pool, cu, gen = make_pool(P, HV, V, K), torch.tensor([0, 2, 4]), torch.Generator()
    x, weight = torch.randn(2, C, 3, generator=gen), torch.randn(C, 4, generator=gen)
    histories = torch.randn(P, C, 3, generator=gen)

    def both(states, windows, histories):
        o = verify(m, q, k, v, pool, indices, states, at, cu_seqlens=cu)
        y = sglang.causal_conv1d_update(
            x, histories, weight, None, "silu", conv_state_indices=indices,
            intermediate_conv_window=windows, intermediate_state_indices=at,
        )  # fmt: skip
        return o, y

    eager, compiled = (
        [torch.zeros(2, 2, HV, V, K), torch.zeros(2, 3, C, 3), histories.clone()] for _ in "12"
    )
    expected = both(*eager)
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(*compiled)
    for have, want in zip([*got, *compiled], [*expected, *eager], strict=True):
        assert torch.equal(have, want)


def test_verification_raises_before_writing():
    q, k, v, _, _ = qkv(4)
    m, at, cu = layer(4), torch.tensor([0, 1]), torch.tensor([0, 2, 4])
    pool, buffer = make_pool(P, HV, V, K), torch.full((2, 2, HV, V, K), 9.0)
    before = pool.clone()
    good = {"m": m, "q": q, "k": k, "v": v, "pool": pool, "indices": torch.tensor([1, 4]),
            "buffer": buffer, "at": at, "cu_seqlens": cu}  # fmt: skip
    wrong = {
        "q": q[:, :, :, 1:], "k": k.double(), "v": v[:, :-1], "indices": torch.tensor([1, P]),
        "at": torch.tensor([0, 2]), "cu_seqlens": torch.tensor([0, 3, 4]),
        "buffer": buffer[:, :, 1:], "pool": pool.double(),
    }  # fmt: skip
    for name, bad in wrong.items():
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            verify(**{**good, name: bad})
        assert torch.equal(pool, before) and (buffer == 9).all(), name
    for bad, message in (
        (buffer.bfloat16(), "torch.float32"), (buffer[0], "steps, HV, V, K"),
        (torch.empty(2, 1, HV, V, K).expand(2, 2, HV, V, K), "strides"),
        (buffer.transpose(0, 1), "one behind another"),
        (buffer.clone().requires_grad_(), "requires? grad"),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError), match=message):
            verify(**{**good, "buffer": bad})


def test_recurrence_refuses_by_name():
    q, k, v, _, _ = qkv(2)
    m, one, pool = layer(2), torch.zeros(1, 2, dtype=torch.int64), make_pool(P, HV, V, K)
    before, indices = pool.clone(), torch.tensor([1])
    for keyword in (
        {"softplus_beta": 2.0}, {"softplus_threshold": 10.0}, {"is_kda": True},
        {"lower_bound": -5.0}, {"match_cutedsl_decode": True}, {"retrieve_parent_token": one},
        {"cache_ring": True}, {"disable_state_update": True},
        {"intermediate_states_buffer": pool[:, None]},
        *({f"replayssm_{what}": pool} for what in ("rawv", "rawk", "g", "beta")),
    ):  # fmt: skip
        name = next(iter(keyword)).removeprefix("softplus_")
        with pytest.raises(NotImplementedError, match=name):
            update(m, q, k, v, pool, indices, **keyword)
    assert torch.equal(pool, before)
    with pytest.raises(TypeError, match="keyword_of_a_later_version"):
        update(m, q, k, v, pool, indices, keyword_of_a_later_version=1)


# --- prefill


CU = torch.tensor([0, 130, 130, 194, 199], dtype=torch.int32)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("l2norm", [True, False])
def test_chunk(state, l2norm):
    q, k, v, g, beta = qkv(199)
    pool = make_pool(P, HV, V, K, state)
    before = pool.clone()
    indices = torch.tensor([5, 2, -1, 0], dtype=torch.int32)
    o, none, h = sglang.chunk_gated_delta_rule(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=pool, initial_state_indices=indices,
        cu_seqlens=CU, head_first=False, use_qk_l2norm_in_kernel=l2norm, inplace_update=True,
    )  # fmt: skip
    expected, states = reference.chunk_prefill(
        q, k, v, g, beta, before, indices, None, None, CU, qk_l2norm=l2norm
    )
    assert none is None and not o[:, 130:194].any()
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool, states, state, SLACK if state is torch.float32 else 1.0)
    # Chunks of the batch: 0, 1, 2 of the first sequence, 3 of padding, 4 of the last.
    chunks = torch.tensor([2, 4, 0, 1, 2])
    got = h.squeeze(0)[chunks]
    assert got.dtype == state and got.shape == (5, HV, V, K)
    assert torch.equal(got[1], before[0]) and torch.equal(got[2], before[5])
    assert torch.equal(got[0], got[4])
    for at, tokens in ((0, 128), (3, 64)):
        part = [x[:, :tokens] for x in (q, k, v, g, beta)]
        _, S = reference.chunk(*part, before[5][None], qk_l2norm=l2norm)
        assert_close("edge", got[at], S[0], state, SLACK if state is torch.float32 else 1.0)
    with pytest.raises(IndexError):
        h[torch.tensor([5])]
    with pytest.raises(TypeError, match="chunk numbers"):
        h[1:2]
    with pytest.raises(IndexError, match="dimension 0"):
        h.squeeze(1)


def test_chunk_without_writing():
    """Several sequences may start from one slot, which stays."""
    q, k, v, g, beta = qkv(12)
    pool, indices, cu = (
        make_pool(P, HV, V, K),
        torch.tensor([3, 3, -1]),
        torch.tensor([0, 5, 9, 12]),
    )
    before = pool.clone()
    o, _, h = sglang.chunk_gated_delta_rule(
        q, k, v, g, beta, 0.3, pool, indices, cu, inplace_update=False
    )
    assert torch.equal(pool, before)
    expected, _ = reference.chunk(q, k, v, g, beta, before[[3, 3, 0]], cu, 0.3)
    assert_close("o", o[:, :9], expected[:, :9], torch.float32, SLACK)
    assert not o[:, 9:].any()
    assert torch.equal(h[torch.tensor([0, 1])], before[[3, 3]])


def test_chunk_without_offsets_or_indices():
    q, k, v, g, beta = make_qkv(2, 70, H, HV, K, V)
    pool = make_pool(P, HV, V, K)
    before = pool.clone()
    o, _, h = sglang.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=pool)
    expected, states = reference.chunk(q, k, v, g, beta, before[:2])
    assert_close("o", o, expected, torch.float32, SLACK)
    assert_close("state", pool[:2], states, torch.float32, SLACK)
    assert torch.equal(pool[2:], before[2:])
    part = [x[1:, :64] for x in (q, k, v, g, beta)]
    got = h.squeeze(0)[torch.tensor([3, 2], dtype=torch.int32)]
    assert_close("edge", got[0], reference.chunk(*part, before[1][None])[1][0], slack=SLACK)
    assert torch.equal(got[1], before[1])
    with pytest.raises(NotImplementedError, match="head_first"):
        sglang.chunk_gated_delta_rule(q, k, v, g, beta, None, pool, head_first=True)
    with pytest.raises(ValueError, match="initial_state"):
        sglang.chunk_gated_delta_rule(q, k, v, g, beta)


# --- convolution


@pytest.mark.parametrize("cuda_form", [False, True])
@pytest.mark.parametrize("pad", [-1, None, 4])
def test_conv_fn(cuda_form, pad):
    m = layer(9)
    cu = torch.tensor([0, 4, 5, 7, 9], dtype=torch.int32)
    indices, has = torch.tensor([3, 4, -1, 0]), torch.tensor([True, True, True, False])
    pool = conv_pool(W - 1)
    before = pool.clone()
    keywords = dict(conv_states=pool, query_start_loc=cu, cache_indices=indices,
                    has_initial_state=has, activation="silu", pad_slot_id=pad,
                    seq_lens_cpu=[4, 1, 2, 2], block_table=None)  # fmt: skip
    call = sglang.causal_conv1d_fn_cuda if cuda_form else sglang.causal_conv1d_fn
    kept = m["x"].clone()
    y = call(m["x"].t(), m["weight"], m["bias"], **keywords)
    mapped = torch.where(indices == 4, -1, indices) if pad == 4 else indices
    expected, states = reference.short_conv(
        m["x"][None], m["weight"], m["bias"], before, mapped, has, cu, None, "silu", True
    )
    assert y.shape == (C, 9) and torch.equal(m["x"], kept)
    assert_close("y", y, expected[0].t())
    assert_close("state", pool, states)
    for missing in ("conv_states", "query_start_loc"):
        with pytest.raises(ValueError, match=missing):
            call(m["x"].t(), m["weight"], None, **{**keywords, missing: None})
    with pytest.raises(TypeError, match="later"):
        call(m["x"].t(), m["weight"], None, **keywords, later=1)


@pytest.mark.parametrize("form", ["one", "several", "cuda"])
def test_conv_update(form):
    m, pool = layer(6), conv_pool(5)
    before = pool.clone()
    indices = torch.tensor([4, -1, 0], dtype=torch.int32)
    x = m["x"].view(3, 2, C).transpose(1, 2) if form == "several" else m["x"][:3]
    call = sglang.causal_conv1d_update_cuda if form == "cuda" else sglang.causal_conv1d_update
    y = call(x, pool, m["weight"], m["bias"], "silu", conv_state_indices=indices)
    wide = x.mT if x.dim() == 3 else x[:, None]
    expected, states = reference.short_conv(
        wide, m["weight"], m["bias"], before, indices, None, None, None, "silu", True
    )
    assert_close("y", y, expected.mT if x.dim() == 3 else expected[:, 0])
    assert_close("state", pool, states)
    pool.copy_(before)
    y = call(x, pool, m["weight"])
    expected, states = reference.short_conv(
        wide, m["weight"], None, before, None, None, None, None, "none", True
    )
    assert_close("y", y, expected.mT if x.dim() == 3 else expected[:, 0])
    assert_close("state", pool, states)


def test_conv_update_with_accepted_counts():
    m, pool, accepted = layer(4), conv_pool(W), torch.tensor([2, 1])
    before, indices = pool.clone(), torch.tensor([4, 0])
    x = m["x"].view(2, 2, C)
    y = sglang.causal_conv1d_update(
        x.mT, pool, m["weight"], None, True, None, indices, num_accept_tokens=accepted
    )
    expected, states = reference.short_conv(
        x, m["weight"], None, before, indices, None, None, accepted, "silu", True
    )
    assert_close("y", y, expected.mT)
    assert_close("state", pool, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [2, 4])
def test_conv_update_keeps_the_history_after_each_token(dtype, steps):
    m, pool, T = layer(6, dtype), conv_pool(W - 1, dtype), 2
    before = pool.clone()
    indices, at = torch.tensor([4, -1, 0]), torch.tensor([3, 1, 0, 2, 2], dtype=torch.int32)
    windows = torch.full((4, steps, C, W - 1), 9.0, dtype=dtype)
    x = m["x"].view(3, T, C)
    y = sglang.causal_conv1d_update(
        x.mT, pool, m["weight"], m["bias"], "silu", conv_state_indices=indices,
        intermediate_conv_window=windows, intermediate_state_indices=at,
    )  # fmt: skip
    expected, states = reference.short_conv(
        x, m["weight"], m["bias"], before, indices, None, None, None, "silu", True
    )
    assert_close("y", y, expected.mT)
    assert_close("state", pool, states)
    for n in (0, 2):
        columns = torch.cat([before[indices[n]], x[n].t()], 1)
        for t in range(T):
            assert torch.equal(windows[at[n], t], columns[:, t + 1 : t + W])
    assert (windows[[1, 2]] == 9).all() and (windows[:, T:] == 9).all()
    # What was kept after the last token is the state that the call left.
    assert torch.equal(windows[3, T - 1], pool[4])


def test_conv_update_refuses_by_name():
    m, one = layer(4), torch.zeros(2, dtype=torch.int32)
    pool, windows = conv_pool(W - 1), torch.zeros(2, 2, C, W - 1)
    before, x = pool.clone(), m["x"].view(2, 2, C).mT
    for name in ("cache_seqlens", "retrieve_next_token", "retrieve_next_sibling",
                 "retrieve_parent_token"):  # fmt: skip
        with pytest.raises(NotImplementedError, match=name):
            sglang.causal_conv1d_update(x, pool, m["weight"], **{name: one})
    with pytest.raises(NotImplementedError, match="cache_seqlens"):
        sglang.causal_conv1d_update_cuda(x, pool, m["weight"], cache_seqlens=one)
    with pytest.raises(NotImplementedError, match="num_accept_tokens"):
        sglang.causal_conv1d_update(
            x, pool, m["weight"], num_accept_tokens=one + 1, intermediate_conv_window=windows
        )
    with pytest.raises(ValueError, match="activation"):
        sglang.causal_conv1d_update(x, pool, m["weight"], activation="relu")
    for wrong in (windows[:, :1], windows[0], windows[..., 1:], windows.int()):
        with pytest.raises(ValueError, match="intermediate_conv_window"):
            sglang.causal_conv1d_update(
                x, pool, m["weight"], intermediate_conv_window=wrong,
                intermediate_state_indices=one,
            )  # fmt: skip
    with pytest.raises(IndexError):
        sglang.causal_conv1d_update(
            x, pool, m["weight"], conv_state_indices=one, intermediate_conv_window=windows,
            intermediate_state_indices=torch.tensor([0, 2]),
        )  # fmt: skip
    assert torch.equal(pool, before) and not windows.any()


# --- invalid calls


def engine_calls():
    """(function, keywords) of calls that work."""
    m, at, cu = layer(3), torch.tensor([3, 1, 5]), torch.tensor([0, 1, 2, 3])
    q, k, v, g, beta = qkv(3)
    gates = {n: m[n] for n in ("A_log", "a", "b", "dt_bias")}
    conv = {"weight": m["weight"], "bias": m["bias"]}
    pool = make_pool(P, HV, V, K)
    gated = {
        **gates, "q": q, "k": k, "v": v, "softplus_beta": 1.0, "softplus_threshold": 20.0,
        "initial_state_source": pool, "initial_state_indices": at, "cu_seqlens": cu,
    }  # fmt: skip
    yield sglang.fused_sigmoid_gating_delta_rule_update, gated
    yield sglang.fused_sigmoid_gating_delta_rule_update, {
        **gated, "disable_state_update": True,
        "intermediate_states_buffer": torch.zeros(3, 2, HV, V, K),
        "intermediate_state_indices": torch.tensor([2, 0, 1]),
    }  # fmt: skip
    yield sglang.fused_recurrent_gated_delta_rule_packed_decode, {
        "mixed_qkv": m["x"], **gates, "scale": 0.5, "initial_state": pool,
        "out": torch.zeros(3, 1, HV, V), "ssm_state_indices": at,
    }  # fmt: skip
    yield sglang.chunk_gated_delta_rule, {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": pool,
        "initial_state_indices": at, "cu_seqlens": cu,
    }  # fmt: skip
    yield sglang.causal_conv1d_fn, {
        "x": m["x"].t(), **conv, "conv_states": conv_pool(W - 1), "query_start_loc": cu,
        "cache_indices": at, "has_initial_state": torch.tensor([True, False, True]),
    }  # fmt: skip
    yield sglang.causal_conv1d_update, {
        "x": m["x"][:, :, None], "conv_state": conv_pool(W - 1), **conv, "conv_state_indices": at,
        "intermediate_conv_window": torch.zeros(3, 1, C, W - 1),
        "intermediate_state_indices": torch.tensor([2, 0, 1]),
    }  # fmt: skip


def test_a_call_that_raises_has_written_nothing():
    assert refusals_that_write_nothing(engine_calls()) > 150
