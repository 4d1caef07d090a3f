"""The paged ops, ``torch.ops.gdn.paged_*``: the views of an engine's blocks, under tracing and for
autograd. What they compute, the tests of the engines' functions compare."""

import pytest
import torch
from common import make_pool, make_qkv
from engines import HV, H, K, P, V, W, conv_pool, layer
from torch import library
from torch._inductor.utils import run_and_get_code

import gdn_ops  # noqa: F401  loads the library


def paged_calls(dtype):
    q, k, v, g, beta = make_qkv(3, 1, H, HV, K, V, dtype=dtype)
    m = layer(3, dtype)
    pool = make_pool(P, HV, V, K)
    rows_ = torch.tensor([3, 0, 5, 0], dtype=torch.int32)  # longer than the batch, as theirs are
    spec = torch.tensor([[3, 1, 9], [-2, 2, 9], [5, 6, 9]])[:, :2]  # columns of a wider table
    gates = (m["a"], m["b"], m["A_log"], m["dt_bias"])
    yield "paged_recurrent", (q, k, v, g, beta, pool, rows_), {"qk_l2norm": True}
    yield "paged_recurrent", (q, k, v, g, beta, pool, spec), {
        "num_accepted": torch.tensor([2, 1, 1]),
    }  # fmt: skip
    yield "paged_recurrent_gated", (q, k, v, *gates, pool, rows_), {"scale": 0.5}
    flat = (q[:, 0], k[:, 0], v[:, 0], *gates, make_pool(P, HV, K, V), rows_)
    yield "paged_recurrent_gated", flat, {
        "cu_seqlens": torch.tensor([0, 1, 2, 3]), "first_row": 0, "kv_rows": True,
    }  # fmt: skip
    packed = (m["x"], *gates, pool, rows_, torch.zeros(3, 1, HV, V, dtype=dtype))
    yield "paged_decode_packed", packed, {"qk_l2norm": True}
    strided = torch.zeros(3, 2, HV, V, dtype=dtype)[:, :1]
    yield "paged_decode_packed", (*packed[:-1], strided), {}
    yield "paged_decode_packed", (*packed[:-2], rows_, strided), {"first_row": 0}
    conv = (m["weight"], m["bias"], conv_pool(W - 1), rows_)
    yield "paged_short_conv", (m["x"], *conv), {}
    yield "paged_short_conv", (m["x"].t(), *conv), {
        "cu_seqlens": torch.tensor([0, 1, 3]), "channels_first": True,
    }  # fmt: skip
    rows_first = (m["weight"], m["bias"], conv_pool(W - 1).mT.contiguous(), rows_[:, None])
    yield "paged_short_conv", (m["x"][:, :, None], *rows_first), {
        "channels_first": True, "channels_last": True, "first_row": 0,
    }  # fmt: skip


def test_paged_ops_opcheck_and_compile():
    for name, args, kwargs in paged_calls(torch.bfloat16):
        torch._dynamo.reset()
        op = getattr(torch.ops.gdn, name).default
        library.opcheck(op, args, kwargs)
        copies = [a.clone() for a in args]
        expected = op(*copies, **kwargs)
        # The views as ops, which other devices run.
        again = [a.clone() for a in args]
        composed = op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *again, **kwargs)
        assert same(composed, expected), name
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        assert same(compiled(*args, **kwargs), expected), name
        for one, two, three in zip(args, copies, again, strict=True):
            assert torch.equal(one, two) and torch.equal(three, two), name


def test_compiled_paged_ops_work_on_the_pool_itself():
    """With dynamic sizes, compiled code copied the pool and read the copy a block too far."""
    for name, args, kwargs in paged_calls(torch.float32):
        torch._dynamo.reset()
        op = getattr(torch.ops.gdn, name).default
        copies = [a.clone() for a in args]
        expected = op(*copies, **kwargs)
        compiled = torch.compile(op, fullgraph=True, dynamic=True)
        got, code = run_and_get_code(compiled, *args, **kwargs)
        assert same(got, expected), name
        assert all(map(torch.equal, args, copies)), name
        assert code[0].count(f"torch.ops.gdn.{name}.default(") == 1, name
        assert "empty_strided" not in code[0].split("def call")[1].split("runner")[0], name


def same(one, two):
    return one is two is None or torch.equal(one, two)


def test_paged_ops_tell_autograd_what_they_wrote():
    for name, args, kwargs in paged_calls(torch.float32):
        op = getattr(torch.ops.gdn, name).default
        written = [
            a for a, x in zip(args, op._schema.arguments, strict=False)
            if x.alias_info is not None and x.alias_info.is_write
        ]  # fmt: skip
        versions = [a._version for a in written]
        with pytest.raises((RuntimeError, ValueError)):
            op(*args[:-1], args[-1][:1], **kwargs)
        assert [a._version for a in written] == versions, name
        op(*args, **kwargs)
        assert all(a._version > old for a, old in zip(written, versions, strict=True)), name
        with torch.inference_mode():
            op(*args, **kwargs)
        args = [a.clone().requires_grad_() if a is written[0] else a for a in args]
        with pytest.raises(RuntimeError, match="requires grad"):
            op(*args, **kwargs)


def test_rows_at_the_ends_of_their_type():
    """The least number is padding like every other below the first row, the greatest is no row."""
    q, k, v, g, beta = make_qkv(2, 1, H, HV, K, V)
    for dtype in (torch.int32, torch.int64):
        ends = torch.iinfo(dtype)
        pool = make_pool(P, HV, V, K)
        before = pool.clone()
        low = torch.tensor([ends.min, 0], dtype=dtype)
        o = torch.ops.gdn.paged_recurrent(q, k, v, g, beta, pool, low)
        assert torch.equal(pool, before) and not o.any()
        with pytest.raises(RuntimeError, match=f"blocks below {P}"):
            torch.ops.gdn.paged_recurrent(
                q, k, v, g, beta, pool, torch.tensor([ends.max, 0], dtype=dtype)
            )


def test_paged_ops_raise_before_writing():
    pool, rows_ = make_pool(P, HV, V, K), torch.tensor([3, 1, 5])
    before = pool.clone()
    q, k, v, g, beta = make_qkv(3, 1, H, HV, K, V)
    m = layer(3)
    with pytest.raises(RuntimeError, match="null block"):
        torch.ops.gdn.paged_recurrent(q, k, v, g, beta, pool[:0], rows_)
    with pytest.raises(RuntimeError, match=r"\[N\] or \[N, S\]"):
        torch.ops.gdn.paged_recurrent(q, k, v, g, beta, pool, rows_[:, None, None])
    with pytest.raises(RuntimeError, match=f"blocks below {P}"):
        torch.ops.gdn.paged_recurrent(q, k, v, g, beta, pool, rows_ + 4)
    with pytest.raises(RuntimeError, match="columns"):
        gates = (m["a"], m["b"], m["A_log"], m["dt_bias"])
        out = torch.zeros(3, 1, HV, V)
        torch.ops.gdn.paged_decode_packed(m["x"][:, :-1], *gates, pool, rows_, out)
    with pytest.raises(RuntimeError, match="two dimensions with cu_seqlens"):
        conv = (m["weight"], None, conv_pool(3), rows_)
        torch.ops.gdn.paged_short_conv(m["x"][None], *conv, cu_seqlens=torch.tensor([0, 3]))
    assert torch.equal(pool, before)
