"""What a decode op takes beyond its outputs: less than 1 MiB, whatever the batch.

A child process warms the op up on a small batch, forbids itself to grow by more than the outputs of
a large one and 1 MiB, and calls it: a scratch buffer of any allocator that grows with the batch
then fails.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import ctypes, resource, sys
import torch
import gdn_ops

H, HV, K, V, W = 1, 2, 128, 128, 4
C = 2 * H * K + HV * V
ops = torch.ops.gdn
torch.set_num_threads(2)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)


def prepare(op, B):
    q, v, g = zeros(B, 1, H, K), zeros(B, 1, HV, V), zeros(B, 1, HV)
    A, state, conv = zeros(HV), zeros(B, HV, V, K), zeros(B, C, W - 1)
    x, weight, norm = zeros(B, 1, C), zeros(C, W), zeros(V)
    if op == "recurrent":
        return lambda: ops.recurrent(q, q, v, g, g, state)
    if op == "recurrent_gated":
        return lambda: ops.recurrent_gated(q, q, v, g, g, A, A, state)
    if op == "gating":
        return lambda: ops.gating(g, g, A, A)
    if op == "short_conv":
        return lambda: ops.short_conv(x, weight, None, conv)
    if op == "conv_gating":
        return lambda: ops.conv_gating(x, g, g, weight, None, A, A, conv, H, K)
    if op == "gated_rms_norm":
        return lambda: ops.gated_rms_norm(v, v, norm)
    if op == "hungry":  # the test of the test: 16 copies of v beside the output
        return lambda: v.repeat(1, 16, 1, 1).sum(1)
    projected = zeros(B, 1, C + HV * V + 2 * HV)
    return lambda: ops.decode(projected, weight, None, A, A, norm, conv, state, H, K)


def outputs(found):
    found = found if isinstance(found, tuple) else (found,)
    return sum(t.numel() * t.element_size() for t in found)


op, B = sys.argv[1], 512
small = prepare(op, 16)
for _ in range(3):
    per_row = outputs(small()) // 16
large = prepare(op, B)
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * resource.getpagesize()
limit = now + per_row * B + 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
large()
print("ran")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "op",
    [
        "recurrent", "recurrent_gated", "gating", "short_conv", "conv_gating", "gated_rms_norm",
        "decode", "hungry",
    ],
)  # fmt: skip
def test_peak_memory(op):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, op], capture_output=True, text=True, timeout=300, check=False
    )
    assert ("ran" in done.stdout) == (op != "hungry"), done.stderr[-2000:]
