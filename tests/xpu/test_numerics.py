"""Every XPU kernel on the twin against the float64 oracle, with a fused and an unfused vmac."""

import pytest
import twin

if not twin.load():
    pytest.skip("built without the XPU twin; rebuild with GDN_BACKEND=xpu-twin", allow_module_level=True)

import torch  # noqa: E402
from cases import CASES  # noqa: E402


@pytest.mark.parametrize("vmac", ["fused", "unfused"])
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, vmac):
    twin.set_vmac(vmac)
    try:
        with torch.no_grad():
            CASES[name]()
    finally:
        twin.set_vmac("fused")
