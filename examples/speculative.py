"""Speculative decoding with rollback: rejected drafts are forgotten by a count, no state is copied.

Each call brings the last true token and some drafts. The next call says how many of them were
accepted; the window then drops the rest before it does anything else.
"""

import argparse

import torch

import gdn_ops
from gdn_ops import windows

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=40, help="tokens that are kept in the end")
parser.add_argument("--drafts", type=int, default=3, help="drafts a call")
args = parser.parse_args()

B, H, HV, K, V, R = 2, 2, 6, 128, 128, 16
T = 1 + args.drafts
gen = torch.Generator().manual_seed(0)


def tokens(n: int):
    """q, k, v, g, beta of n tokens a sequence."""
    q, k = torch.randn(2, B, n, H, K, generator=gen)
    v = torch.randn(B, n, HV, V, generator=gen)
    return q, k, v, -torch.rand(B, n, HV, generator=gen), torch.rand(B, n, HV, generator=gen)


true = tokens(args.tokens + T)
base, window = torch.zeros(B, HV, V, K), windows.allocate(B, H, HV, K, V, R)
done = torch.zeros(B, dtype=torch.int64)  # true tokens kept so far, a sequence
accepted, outputs, calls = None, [[] for _ in range(B)], 0

while int(done.min()) < args.tokens:
    # How many of this call's tokens the model will agree with; beyond them the drafts are noise.
    right = torch.randint(1, T + 1, (B,), generator=gen).minimum(args.tokens + T - done)
    place = torch.arange(T)
    inputs = []
    for whole, noise in zip(true, tokens(T), strict=True):
        ours = torch.stack(
            [whole[n, (done[n] + place).clamp(max=whole.shape[1] - 1)] for n in range(B)]
        )
        keep = (place < right[:, None]).view(B, T, *[1] * (ours.dim() - 2))
        inputs.append(torch.where(keep, ours, noise))
    o = gdn_ops.recurrent_buffered(*inputs, base, *window, num_accepted=accepted, qk_l2norm=True)
    for n in range(B):
        outputs[n] += o[n, : right[n]]
    done, accepted, calls = done + right, right.int(), calls + 1

pool = torch.zeros(B, HV, V, K)
want = gdn_ops.recurrent(*true, pool, qk_l2norm=True)
got = torch.stack([torch.stack(outputs[n][: args.tokens]) for n in range(B)])
want = want[:, : args.tokens]
error = float((got - want).abs().max() / want.abs().max())
assert error < 1e-5, error
print(
    f"{args.tokens} tokens in {calls} calls of 1 + {args.drafts}; the largest relative "
    f"difference from one token after the other is {error:.1e}"
)
