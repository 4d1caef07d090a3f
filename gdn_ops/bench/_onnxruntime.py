"""onnxruntime's LinearAttention operator, a peer of several families, on torch's memory.

States are ``[N, HV, K, V]`` and float32 like everything else; ``past_state`` is read and
``present_state`` written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Unusable(Exception):
    """The operator cannot run here; the text says why."""


def session(feeds: dict[str, Tensor], outputs: dict[str, Tensor], H: int, HV: int) -> Any:
    """A session that runs the operator on tensors of these names and shapes, all contiguous.

    Args:
        feeds: ``query``, ``key`` ``[N, T, H*K]``, ``value`` ``[N, T, HV*V]``, ``past_state``,
            ``decay``, ``beta`` ``[N, T, HV]``.
        outputs: ``output`` like value, ``present_state`` like past_state.

    Raises:
        Unusable: a package is missing, or this onnxruntime refuses the operator.
    """
    if not all(t.is_cpu for t in feeds.values()):
        raise Unusable("timed on the CPU only")
    try:
        import numpy  # noqa: F401 - for bind()
        import onnxruntime as ort
        from onnx import TensorProto, helper
    except ImportError as error:
        raise Unusable(f"{error.name} is not installed (pip install {error.name})") from error
    node = helper.make_node(
        "LinearAttention", list(feeds), list(outputs), domain="com.microsoft",
        q_num_heads=H, kv_num_heads=HV, update_rule="gated_delta", scale=0.0,
    )  # fmt: skip

    def infos(tensors: dict[str, Tensor]) -> list:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(t.shape))
            for name, t in tensors.items()
        ]

    graph = helper.make_graph([node], "layer", infos(feeds), infos(outputs))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    # Otherwise its idle workers spin on the cores that the next candidate needs.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's own exception classes are not public
        raise Unusable(f"onnxruntime {ort.__version__} refuses it: {error}") from error


def bind(session: Any, feeds: dict[str, Tensor], outputs: dict[str, Tensor]) -> Any:
    """What ``run_with_iobinding`` takes. It holds addresses only: keep the tensors alive."""
    import numpy as np

    binding = session.io_binding()
    for name, t in feeds.items():
        binding.bind_input(name, "cpu", 0, np.float32, list(t.shape), t.data_ptr())
    for name, t in outputs.items():
        binding.bind_output(name, "cpu", 0, np.float32, list(t.shape), t.data_ptr())
    return binding


def version() -> str:
    import onnxruntime

    return onnxruntime.__version__
