"""Invalid calls, and valid ones that these kernels do not take, leave every tensor as it was."""

import copy

import pytest
import test_arguments as arguments
import torch

import gdn_ops


def sized(monkeypatch, K: int, V: int) -> None:
    """Heads of other sizes for the calls of test_arguments.py."""
    for name, value in (("K", K), ("V", V), ("C", 2 * arguments.H * K + arguments.HV * V)):
        monkeypatch.setattr(arguments, name, value)


# conv1d has no kernel here, linear is a product of torch's: neither knows of other devices.
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("op", [op for op in arguments.OPS if op not in ("conv1d", "linear")])
def test_every_invalid_call_raises_before_any_write(op, packed, device, monkeypatch):
    sized(monkeypatch, 64, 32)
    torch.manual_seed(0)
    args = arguments.on(device, arguments.valid(op, packed))
    if op == "short_conv":  # five columns a channel are taken with channels last only
        args["conv_state"] = args["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    getattr(gdn_ops, op)(**copy.deepcopy(args))
    cases = list(arguments.breaks(op, args))
    assert len(cases) >= 10
    assert not (wrong := arguments.wrongly_answered(op, cases)), "\n".join(wrong)


@pytest.mark.parametrize(
    "op,K,V,message",
    [
        ("decode", 512, 4, "K = 512: the XPU kernels take K up to 256"),
        ("decode", 8, 512, "V = 512: the XPU norm takes V up to 256"),
        *((op, 8, 32, "K = 8: the XPU windows take K = 64, 128 or 256")
          for op in ("recurrent_buffered", "decode_buffered", "decode_lowrank")),
        *((op, 64, 4, "V = 4: the XPU windows take multiples of 32")
          for op in ("recurrent_lowrank", "decode_buffered", "decode_lowrank")),
    ],
)  # fmt: skip
def test_a_step_is_refused_before_its_first_launch(op, K, V, message, device, monkeypatch):
    sized(monkeypatch, K, V)
    args = arguments.on(device, arguments.valid(op, False))
    before = copy.deepcopy(args)
    with pytest.raises(RuntimeError, match=f"{op}: {message}"):
        getattr(gdn_ops, op)(**args)
    for name in arguments.written(args):
        assert torch.equal(args[name].cpu(), before[name].cpu()), name
