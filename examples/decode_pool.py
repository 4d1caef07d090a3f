"""Continuous batching on a pool of states: requests come and go, their rows are reused.

The pool is allocated once. A step names the row of each sequence it moves; a new request starts
from zero by a flag, without clearing its row, and a batch of fixed size is filled with padding.
"""

import argparse

import torch

import gdn_ops

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--rows", type=int, default=6, help="pool rows")
parser.add_argument("--batch", type=int, default=4, help="sequences a step")
parser.add_argument("--requests", type=int, default=9)
args = parser.parse_args()

H, HV, K, V = 2, 6, 128, 128
torch.manual_seed(0)
pool = torch.zeros(args.rows, HV, V, K)
waiting = [
    (request, int(length)) for request, length in enumerate(torch.randint(2, 9, (args.requests,)))
]
free = list(range(args.rows))
running: dict[int, list[int]] = {}  # request: [row, tokens left, tokens done]
steps = tokens = 0

while waiting or running:
    while waiting and free and len(running) < args.batch:
        request, length = waiting.pop(0)
        running[request] = [free.pop(), length, 0]
    batch = list(running)
    padding = args.batch - len(batch)
    rows = torch.tensor([running[r][0] for r in batch] + [-1] * padding, dtype=torch.int32)
    old = torch.tensor([running[r][2] > 0 for r in batch] + [True] * padding)
    q, k = torch.randn(2, args.batch, 1, H, K).bfloat16()
    v = torch.randn(args.batch, 1, HV, V).bfloat16()
    g, beta = -torch.rand(args.batch, 1, HV), torch.rand(args.batch, 1, HV)

    o = gdn_ops.recurrent(q, k, v, g, beta, pool, rows, old, qk_l2norm=True)  # [batch, 1, HV, V]

    assert not o[len(batch) :].any(), "padding gives zeros"
    steps, tokens = steps + 1, tokens + len(batch)
    for request in batch:
        running[request][1] -= 1
        running[request][2] += 1
        if not running[request][1]:
            free.append(running.pop(request)[0])

print(f"{args.requests} requests, {tokens} tokens in {steps} steps on {args.rows} rows of state")
