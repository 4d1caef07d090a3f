"""A few of the random calls of tests/calls.py, the same ones each time: 12 of each op. For more:
scripts/random_calls.py."""

import pytest
import test_arguments
import torch
from calls import OPS, Call, Refused

from gdn_ops import xpu_twin

SEEDS = range(12)


@pytest.mark.parametrize("op", OPS)
def test_on_the_cpu(op):
    for seed in SEEDS:
        Call(op, seed).check()


@pytest.mark.skipif(not xpu_twin.available(), reason="built without the XPU twin")
@pytest.mark.parametrize("op", OPS)
def test_on_the_twin(op):
    done = 0
    for seed in SEEDS[:4]:
        try:
            Call(op, seed).check(xpu_twin.device())
            done += 1
        except Refused:
            pass
    assert done


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")
def test_on_cuda():
    for op in OPS:
        for seed in SEEDS:
            Call(op, seed).check(torch.device("cuda"))


def test_every_op_is_drawn():
    assert set(OPS) == set(test_arguments.OPS)
