"""A compiled layer: torch.compile sees the ops, and the pool is still written where it lies."""

import argparse

import torch

from gdn_ops.nn import GatedDeltaNet

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", default="inductor", help="of torch.compile")
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
layer = GatedDeltaNet(64, num_k_heads=2, num_v_heads=6, head_k_dim=32, head_v_dim=32).eval()
rows = torch.tensor([5, 2, 0], dtype=torch.int32)
x = torch.randn(args.steps, 3, 1, 64)


@torch.compile(backend=args.backend, fullgraph=True)
def step(x, states):
    return layer.decode(x, states, rows)


with torch.no_grad():
    mine, plain = layer.allocate(8), layer.allocate(8)
    address = mine.state.data_ptr()
    for token in x:
        torch.testing.assert_close(step(token, mine), layer.decode(token, plain, rows))
torch.testing.assert_close(mine.state, plain.state)
assert mine.state.data_ptr() == address
print(f"{args.steps} compiled steps equal {args.steps} eager ones; the pool was not copied")
