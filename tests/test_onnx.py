"""An oracle that is not ours: the ``LinearAttention`` evaluator of the onnx package."""

from __future__ import annotations

import pytest
import torch
from common import assert_close, make_pool, make_qkv

import gdn_ops

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
pytest.importorskip(
    "onnx.reference.ops.op_linear_attention", reason="this onnx has no LinearAttention"
)


def evaluate(q, k, v, g, beta, state, scale):
    """Output and new state; the evaluator wants q and k a value head and keeps [B, H, K, V]."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    B, T, HV, V = v.shape
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    feeds = {
        "query": q.flatten(2), "key": k.flatten(2), "value": v.flatten(2),
        "past_state": state.transpose(-1, -2), "decay": g, "beta": beta,
    }  # fmt: skip
    node = helper.make_node(
        "LinearAttention", list(feeds), ["output", "present_state"],
        q_num_heads=HV, kv_num_heads=HV, update_rule="gated_delta", scale=scale,
    )  # fmt: skip

    def info(name, shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))

    graph = helper.make_graph(
        [node], "step", [info(n, t.shape) for n, t in feeds.items()],
        [info("output", (B, T, HV * V)), info("present_state", feeds["past_state"].shape)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    run = ReferenceEvaluator(model).run
    o, new = run(None, {n: t.contiguous().numpy() for n, t in feeds.items()})
    return torch.from_numpy(o).unflatten(2, (HV, V)), torch.from_numpy(new).transpose(-1, -2)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("K, V, ratio", [(8, 8, 1), (64, 32, 3), (128, 128, 2), (100, 24, 6)])
def test_recurrent(K, V, ratio, T, scale):
    args = make_qkv(2, T, 2, 2 * ratio, K, V)
    pool = make_pool(2, 2 * ratio, V, K)
    want_o, want_state = evaluate(*args, pool, scale or 0.0)
    o = gdn_ops.recurrent(*args, pool, scale=scale)
    assert_close("o", o, want_o, slack=4)
    assert_close("state", pool, want_state, slack=4)


def test_chunk():
    args = make_qkv(1, 150, 2, 4, 64, 32)
    state = make_pool(1, 4, 32, 64)
    want_o, want_state = evaluate(*args, state, 0.0)
    o, final = gdn_ops.chunk(*args, initial_state=state)
    assert_close("o", o, want_o, slack=8)
    assert_close("state", final, want_state, slack=8)
