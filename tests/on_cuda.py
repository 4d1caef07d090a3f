"""Pytest plug-in: the tests of the CPU ops, unchanged, on an NVIDIA device.

PYTHONPATH=tests python -m pytest -p on_cuda tests/test_recurrent.py tests/test_conv.py
"""

from __future__ import annotations

import pytest
import torch
from on_device import OnDevice, skip

# Words in the names of tests that ask what this device does not do, and why.
NOT_HERE = {
    "raises_before_writing": "no kernel can raise: values are checked where the host can read them",
    "b7_invalid_metadata": "the same",
    "paged_ops_raise_before": "the same",
    "errors_count_blocks": "the same",
    "rows_at_the_ends_of_their_type": "the same",
    "fast": "precision modes are the CPU's",
    "threads": "threads of the CPU",
    "opcheck": "asks torch, not the kernels",
    "fake": "the same",
    "symbolic": "the same",
    "compile": "the same",
    "scratch_does_not_grow": "memory of the process",
    "silu_at_its_ends": "minus infinity times zero is NaN here",
    "test_linear.py": "torch's own product",
    # docs/cuda.md: what a 16-bit call rounds on the way.
    **{
        f"test_decode.py::test_against_oracle[act{i}": "q, k, v and o are rounded between launches"
        for i in range(3, 9)
    },
    "test_chunk.py::test_head_dims[64-64]": "factors of 16 bits: tests/test_cuda_chunk.py",
    "test_chunk.py::test_head_dims[128-128]": "the same",
    "test_chunk.py::test_gradients_of_any_shape[False-2-None-1-3-128-64-64-dtype": "the same",
    "test_chunk.py::test_gradients_of_any_shape[True-2-None-1-3-128-64-64-dtype": "the same",
}


def pytest_collection_modifyitems(items):
    skip(items, NOT_HERE)


@pytest.fixture(autouse=True)
def on_cuda():
    with OnDevice(torch.device("cuda"), "the CUDA kernels take"):
        yield
