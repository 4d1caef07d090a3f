"""What makes a call safe to capture in a graph: nothing on the device is read by the host."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from twin import Ops, assert_close, to_device

import gdn_ops
from gdn_ops import reference, xpu_twin

XPU = Path(__file__).parent.parent.parent / "csrc" / "xpu"


def test_the_host_cannot_follow_a_device_pointer(device):
    """So that every test of an op shows that its launch does not."""
    program = (
        "import ctypes, torch, gdn_ops\n"
        "x = torch.ones(4, device=gdn_ops.xpu_twin.device())\n"
        "assert x.sum().item() == 4\n"
        "print('before', flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "before\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_copies_are_counted(device):
    x = torch.arange(3.0)
    before = xpu_twin.host_copies()
    y = x.to(device)
    assert xpu_twin.host_copies() == before + 1
    _ = y.sum()  # runs on the CPU, which is no copy of ours
    assert xpu_twin.host_copies() == before + 1
    assert y[1].item() == 1.0 and y.cpu().tolist() == [0.0, 1.0, 2.0]
    assert xpu_twin.host_copies() == before + 3


def test_a_copy_inside_a_call_is_an_error(device, monkeypatch):
    x = torch.ones(2, device=device)
    monkeypatch.setattr(torch.ops.gdn, "leaky", lambda t: t.cpu(), raising=False)
    with pytest.raises(AssertionError, match="leaky: 1 copies"):
        Ops().leaky(x)


def test_lengths_are_the_devices(device):
    """One set of shapes, any lengths: what a captured prefill is replayed with."""
    H, K, V, T, N = 1, 32, 32, 70, 4
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, H, d, generator=g) for d in (K, K, V))
    gate, beta = -torch.rand(1, T, H, generator=g), torch.rand(1, T, H, generator=g)
    start = torch.randn(N, H, V, K, generator=g)
    launches = []
    for lengths in ([70, 0, 0, 0], [0, 1, 0, 69], [16, 16, 32, 6], [17, 18, 17, 18]):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        want, pool = reference.chunk_prefill(
            q, k, v, gate, beta, start, None, None, None, cu, None, None, True, 16
        )
        state, cu = to_device(start), to_device(cu)
        xpu_twin.reports()
        before = xpu_twin.host_copies()
        moved = [to_device(x) for x in (q, k, v, gate, beta)]
        inputs = xpu_twin.host_copies() - before
        before = xpu_twin.host_copies()
        with torch.no_grad():
            o = gdn_ops.chunk_prefill(*moved, state, cu_seqlens=cu, chunk_size=16, qk_l2norm=True)
        assert inputs == 5 and xpu_twin.host_copies() == before
        launches.append([r["kernel"] for r in xpu_twin.reports()])
        assert_close("o", o, want, noise=16)
        assert_close("state", state, pool, noise=16)
    assert all(x == launches[0] for x in launches), "the lengths changed what was launched"


@pytest.mark.parametrize("cu", [[0, 5, 400, 20], [0, 30, 10, 20], [-3, 5, 9, 20], [4, 9, 9, 12]])
def test_offsets_that_leave_the_tensor(device, cu):
    """No kernel can raise: such a sequence is empty, and nothing outside the tensors is touched."""
    T, N, K = 20, 3, 32
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, T, 1, K, generator=g) for _ in range(3))
    gate, beta = -torch.rand(1, T, 1, generator=g), torch.rand(1, T, 1, generator=g)
    start = torch.randn(N, 1, K, K, generator=g)
    state = to_device(start)
    with torch.no_grad():
        o = gdn_ops.chunk_prefill(
            *map(to_device, (q, k, v, gate, beta)), state, cu_seqlens=to_device(torch.tensor(cu)),
            chunk_size=16,
        ).cpu()  # fmt: skip
    assert o.isfinite().all() and state.isfinite().all()
    covered = torch.zeros(T, dtype=torch.bool)
    for n, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        if 0 <= a <= b <= T:
            covered[a:b] = True
        if not 0 <= a < b <= T:
            assert torch.equal(state.cpu()[n], start[n])
    assert o[0, ~covered].eq(0).all()


def test_launches_neither_allocate_nor_read_the_device_on_the_host():
    """The same rule in the sources."""
    for name in ("runtime/host.cpp", "runtime/host.h"):
        text = (XPU / name).read_text()
        assert not re.search(r"device_alloc|device_copy|stream_wait|malloc|new ", text), name
    for name in ("ops.cpp", "chunk.cpp", "glue.h"):
        text = (XPU / name).read_text()
        assert not re.search(
            r"\.item\(|\.cpu\(\)|check_values|check_conv_values|kCPU|at::tensor\(", text
        ), name
