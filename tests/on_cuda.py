"""Pytest plug-in: the tests of the CPU ops, unchanged, on an NVIDIA device.

PYTHONPATH=tests python -m pytest -p on_cuda tests/test_recurrent.py tests/test_conv.py
"""

from __future__ import annotations

import pytest
import torch
from on_device import OnDevice, skip

# Why a test asks what this device does not do: words in the names of such tests.
NOT_HERE = {
    "no kernel can raise: values are checked where the host can read them": (
        "raises_before_writing", "b7_invalid_metadata", "paged_ops_raise_before",
        "errors_count_blocks", "rows_at_the_ends_of_their_type", "accepted_counts_out_of_range",
        "speculation_needs_no_more_than_the_window", "win_fill: expected counts",
        "offsets_that_end_early",
    ),
    "precision modes are the CPU's": ("fast",),
    "threads of the CPU": ("threads",),
    "asks torch, not the kernels": ("opcheck", "fake", "symbolic", "compile"),
    "memory of the process": ("scratch_does_not_grow",),
    "torch's own product": ("test_linear.py",),
    # docs/cuda.md: what a 16-bit call rounds on the way.
    "q, k, v and o are rounded between launches": tuple(
        f"test_decode.py::test_against_oracle[act{i}" for i in range(3, 9)
    ) + tuple(f"test_windows.py::test_decode_against_oracle[act{i}" for i in (1, 2)),
    "factors of 16 bits, see tests/test_cuda_chunk.py": (
        "test_chunk.py::test_head_dims[64-64]",
        "test_chunk.py::test_head_dims[128-128]",
        "test_chunk.py::test_gradients_of_any_shape[False-2-None-1-3-128-64-64-dtype",
        "test_chunk.py::test_gradients_of_any_shape[True-2-None-1-3-128-64-64-dtype",
    ) + tuple(
        f"test_large_calls_equal_their_sequences[act{i}-dtype{j}-128-128"
        for i in (1, 2) for j in range(3)
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items):
    skip(items, NOT_HERE)


@pytest.fixture(autouse=True)
def on_cuda():
    with OnDevice(torch.device("cuda")):
        yield
