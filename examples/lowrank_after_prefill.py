"""Low-rank decoding after a prefill: the state is the last R updates, from the prompt on.

An approximation. How good it is depends on how fast the decay forgets, so look at the numbers.
"""

import argparse

import torch

import gdn_ops
from gdn_ops import windows

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--prompt", type=int, default=96)
parser.add_argument("--tokens", type=int, default=16)
parser.add_argument("--deepest", type=float, default=3.0, help="g is uniform in (-DEEPEST, 0)")
args = parser.parse_args()

B, H, HV, K, V = 2, 2, 6, 128, 128
T = args.prompt + args.tokens
torch.manual_seed(0)
q, k = torch.nn.functional.normalize(torch.randn(2, B, T, H, K), dim=-1)
v = torch.randn(B, T, HV, V)
g, beta = -args.deepest * torch.rand(B, T, HV), torch.rand(B, T, HV)
prompt = [x[:, : args.prompt] for x in (q, k, v, g, beta)]
steps = [[x[:, t : t + 1] for x in (q, k, v, g, beta)] for t in range(args.prompt, T)]

pool = torch.zeros(B, HV, V, K)
gdn_ops.chunk_prefill(*prompt, pool)
exact = torch.cat([gdn_ops.recurrent(*x, pool) for x in steps], 1)

errors = []
for R in (8, 16, 32):
    window = windows.allocate(B, H, HV, K, V, R)
    gdn_ops.chunk_lowrank(*prompt, *window)  # leaves the window ready to decode
    o = torch.cat([gdn_ops.recurrent_lowrank(*x, *window) for x in steps], 1)
    errors.append(float((o - exact).norm() / exact.norm()))
    size = sum(x.numel() * x.element_size() for x in window)
    full = pool.numel() * pool.element_size()
    print(f"R = {R:2d}: relative error {errors[-1]:.1e}, {size / full:.2f} of the state's bytes")
assert errors[0] >= errors[-1], "a longer window is no worse"
