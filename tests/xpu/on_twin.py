"""Pytest plug-in: the tests of the CPU ops, unchanged, on the XPU twin.

PYTHONPATH=tests:tests/xpu python -m pytest -p on_twin tests/test_recurrent.py
"""

from __future__ import annotations

import pytest
from on_device import OnDevice, skip

from gdn_ops import xpu_twin

# Why a test asks what a device cannot answer, or what docs/xpu.md says the XPU does not do: words
# in the names of such tests.
NOT_HERE = {
    "no kernel can raise: values are checked where the host can read them": (
        "raises_before_writing", "paged_ops_raise_before", "errors_count_blocks",
        "rows_at_the_ends_of_their_type",
    ),
    "the XPU has one precision": ("fast",),
    "threads of the CPU": ("threads",),
    "asks torch, not the kernels": (
        "opcheck", "fake", "compile", "autocast_converts", "gradcheck", "gradient",
    ),
    "torch's own product": ("whoever_calls",),
    "float64 is torch's form, which the XPU does not have": ("states_of_any_dtype[dtype2",),
    "memory of the process, which is the twin's": ("scratch_does_not_grow",),
    "zero times NaN in a product reaches the tokens of a chunk": ("later_token",),
    "zero times infinity in such a product": ("minus_inf_clears_even",),
    "sigmoid is bounded by 2^-120": ("silu_at_its_ends",),
    # docs/ops/decode.md: K = 40 does not fit one launch.
    "q, k, v and o are rounded between launches": tuple(
        f"test_decode.py::test_against_oracle[act{i}" for i in range(3, 9)
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items):
    skip(items, NOT_HERE)


@pytest.fixture(autouse=True)
def on_twin():
    with OnDevice(xpu_twin.device()):
        yield
