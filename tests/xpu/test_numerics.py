"""Every XPU kernel on the twin against the float64 oracle, with a fused and an unfused vmac."""

import pytest
import torch
from cases import CASES

from gdn_ops import xpu_twin


@pytest.mark.parametrize("vmac", ["fused", "unfused"])
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, vmac):
    xpu_twin.set_vmac(vmac)
    try:
        with torch.no_grad():
            CASES[name]()
    finally:
        xpu_twin.set_vmac("fused")
