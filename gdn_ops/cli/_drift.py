"""``verify --drift``: the error of a long run of one-token steps, by state mode and dtype.

Full and buffered are held against the float64 recurrence, lowrank against its own oracle, so
that a row shows what arithmetic and storage cost, not what the approximation leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import gdn_ops
from gdn_ops import reference, windows

H, HV, K, V = 2, 6, 64, 64
RANKS = (8, 16)


def inputs(steps: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v, g, beta: unit keys and a slow decay, which forgets errors slowly, too."""
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, steps, H, K, generator=gen) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = torch.randn(1, steps, HV, V, generator=gen)
    g = -0.05 * torch.rand(1, steps, HV, generator=gen)
    beta = torch.rand(1, steps, HV, generator=gen)
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta]


def modes(state: torch.dtype) -> Iterator[tuple[str, Callable[[list[Tensor]], Tensor]]]:
    """Each state mode as ``(name, step)`` with pools of its own; windows are of the state's dtype,
    for buffered float32 too."""
    pool = torch.zeros(1, HV, V, K, dtype=state)
    yield "full", lambda x: gdn_ops.recurrent(*x, pool)
    for R in RANKS:
        for kept in dict.fromkeys((torch.float32, state)):
            w = windows.allocate(1, H, HV, K, V, R, update_dtype=kept, key_dtype=kept)
            base = torch.zeros_like(pool)
            yield (
                f"buffered R={R}" + ("" if kept == torch.float32 else ", window as the state"),
                lambda x, base=base, w=w: gdn_ops.recurrent_buffered(*x, base, *w),
            )
    for R in RANKS:
        w = windows.allocate(1, H, HV, K, V, R, update_dtype=state, key_dtype=state)
        yield f"lowrank R={R}", lambda x, w=w: gdn_ops.recurrent_lowrank(*x, *w)


def truths(x: list[Tensor]) -> dict[str, Tensor]:
    """The float64 outputs of each mode."""
    state = torch.zeros(1, HV, V, K, dtype=torch.float64)
    full, _ = reference.recurrent(*x, state)
    found = {"full": full}
    for R in RANKS:
        found[f"buffered R={R}"] = full
        w = tuple(y.double() for y in windows.allocate(1, H, HV, K, V, R)[:3])
        w = (*w, torch.zeros(1, dtype=torch.int32))
        outputs = []
        for t in range(x[0].shape[1]):
            o, w = reference.recurrent_lowrank(*[y[:, t : t + 1] for y in x], *w)
            outputs.append(o)
        found[f"lowrank R={R}"] = torch.cat(outputs, 1)
    return found


def rows(steps: int, activations: dict[str, torch.dtype], states: dict[str, torch.dtype],
         seed: int, status: Callable[[str], None]) -> list[dict]:  # fmt: skip
    """RMS error relative to the RMS of the output: of the first tenth of the run, of the last, and
    the largest single error."""
    found = []
    for act_name, act in activations.items():
        x = inputs(steps, act, seed)
        status(f"oracles {act_name}")
        expected = truths(x)
        for state_name, state in states.items():
            for name, step in modes(state):
                status(f"{name} {act_name} state {state_name}")
                want = expected[name.split(",")[0]]
                got = torch.cat([step([y[:, t : t + 1] for y in x]) for t in range(steps)], 1)
                error = (got.double() - want).square().mean((0, 2, 3)).sqrt()
                rms = float(want.square().mean().sqrt())
                tenth = max(1, steps // 10)
                found.append(
                    {
                        "mode": name,
                        "dtype": act_name,
                        "state": state_name,
                        "first": float(error[:tenth].square().mean().sqrt()) / rms,
                        "last": float(error[-tenth:].square().mean().sqrt()) / rms,
                        "max": float((got.double() - want).abs().max()),
                    }
                )
    return found
