"""Pytest plug-in: the tests of the CPU ops, unchanged, on the XPU twin.

PYTHONPATH=tests:tests/xpu python -m pytest -p on_twin tests/test_recurrent.py
"""

from __future__ import annotations

import pytest
from on_device import OnDevice, skip

from gdn_ops import xpu_twin

# Words in the names of tests that ask what a device cannot answer, or what docs/xpu.md says the XPU
# does not do.
NOT_HERE = {
    "raises_before_writing": "no kernel can raise: values are checked where the host can read them",
    "paged_ops_raise_before": "the same",
    "errors_count_blocks": "the same",
    "rows_at_the_ends_of_their_type": "the same",
    "fast": "the XPU has one precision",
    "threads": "threads of the CPU",
    "opcheck": "asks torch, not the kernels",
    "fake": "the same",
    "compile": "the same",
    "autocast_converts": "the same",
    "whoever_calls": "torch's own product",
    "gradcheck": "the same",
    "gradient": "the same",
    "scratch_does_not_grow": "memory of the process, which is the twin's",
    "later_token": "zero times NaN in a product reaches the tokens of a chunk",
    "minus_inf_clears_even": "zero times infinity, as above",
    "silu_at_its_ends": "sigmoid is bounded by 2^-120",
    # docs/ops/decode.md: K = 40 does not fit one launch.
    **{
        f"test_decode.py::test_against_oracle[act{i}": "q, k, v and o are rounded between launches"
        for i in range(3, 9)
    },
}


def pytest_collection_modifyitems(items):
    skip(items, NOT_HERE)


@pytest.fixture(autouse=True)
def on_twin():
    with OnDevice(xpu_twin.device(), "the XPU"):
        yield
