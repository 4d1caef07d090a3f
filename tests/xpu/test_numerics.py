"""Every XPU kernel against the float64 oracle: on the twin with both models of vmac and every
switch, on a Kunlun device with what was built.
"""

import pytest
import torch
from cases import CASES
from twin import on_kunlun

from gdn_ops import xpu_twin

SWITCHES = ("GDN_XPU_SCALAR_MAC", "GDN_XPU_NO_MERGE32")
BUILDS = {
    "fused": ("fused", ()),
    "unfused": ("unfused", ()),
    "scalar_mac": ("fused", SWITCHES[:1]),
    "no_merge32": ("fused", SWITCHES[1:]),
    "both switches, unfused": ("unfused", SWITCHES),
}


@pytest.mark.runs_on_kunlun
@pytest.mark.parametrize("name", CASES if on_kunlun() else ())
def test_against_oracle_on_the_device(name):
    """Of a build with GDN_BACKEND=xpu where torch sees a device."""
    with torch.no_grad():
        CASES[name]()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name, build):
    vmac, on = BUILDS[build]
    xpu_twin.set_vmac(vmac)
    for switch in on:
        xpu_twin.set_switch(switch, True)
    try:
        with torch.no_grad():
            CASES[name]()
    finally:
        xpu_twin.set_vmac("fused")
        for switch in on:
            xpu_twin.set_switch(switch, False)
