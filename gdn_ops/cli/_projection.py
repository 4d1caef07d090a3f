"""What the rows of ``gdn-ops explore`` mean for a model: the projection and the verdict."""

from __future__ import annotations

import argparse

import torch

from gdn_ops.bench import recurrent, windows
from gdn_ops.bench._timing import SHORT
from gdn_ops.cli._matrix import PARTS_HIDDEN, Plan


def sweeps(scaling: list[dict], matrix: list[dict]) -> dict[int, list[float]]:
    """Bytes a second of the in-place sweeps beside the full float32 state, by batch."""
    rates: dict[int, list[float]] = {}
    for row in scaling:
        if row["candidate"] == "gdn_ops" and row["ms"] is not None:
            rates.setdefault(row["batch"], []).append(row["gbps"] * row["ratio"] * 1e9)
    for row in matrix:
        if (row["candidate"], row["state"]) == ("recurrent", "f32") and row["ms"] is not None:
            rates.setdefault(row["batch"], []).append(row["gbps"] * row["ratio"] * 1e9)
    return rates


def disturbance(rates: dict[int, list[float]]) -> str | None:
    """A warning, if the same sweep ran at different speeds: then other times are no better."""
    for batch, found in rates.items():
        if max(found) > 1.5 * min(found):
            return (
                f"measured: the same sweep at batch {batch} ran at {min(found) / 1e9:.3g} and at "
                f"{max(found) / 1e9:.3g} GB/s in this run: something else used the machine, and "
                "some of the times above are too long."
            )
    return None


def projection_rows(
    args: argparse.Namespace, plan: Plan, measured: list[dict], bandwidth: float
) -> list[dict]:
    """Tokens a second that the state traffic alone allows, and what was reached here."""
    H, HV = plan.heads
    activations = recurrent.Inputs(1, H, HV, torch.bfloat16, args.seed).bytes
    f32 = torch.float32
    forms: list[tuple[str, str, float]] = []
    for dtype in plan.dtypes:
        full = 2 * HV * windows.K * windows.V * dtype.itemsize
        forms.append(("recurrent", SHORT[dtype], full))
        for R in plan.windows:
            moved = windows.bytes_per_token(H, HV, dtype, R, f32, f32)
            forms.append((f"recurrent_buffered R={R}", SHORT[dtype], moved))
    for R in plan.windows:
        moved = windows.bytes_per_token(H, HV, None, R, f32, f32)
        forms.append((f"recurrent_lowrank R={R}", "f32", moved))
    largest = plan.batches[-1]
    rows = []
    for name, state, moved in forms:
        total = args.layers * (moved + activations)
        bound = args.ranks * bandwidth / total
        here = [
            r
            for r in measured
            if (r["candidate"], r["state"], r["batch"]) == (name, state, largest)
            and r["precision"] == "exact"
            and not r["skipped"]
        ]
        reached = largest / (args.layers * here[0]["ms"] / 1e3) if here else None
        rows.append(
            {
                "form": name,
                "state": state,
                "mb_per_token": total / 1e6,
                "tokens_per_s_bound": bound,
                "of_goal": bound / args.goal,
                "tokens_per_s_here": reached,
                "batch_here": largest,
            }
        )
    return rows


def model_columns(row: dict, args: argparse.Namespace, base: float | None) -> dict:
    """What a layer's time means for the model; projected from the measured time."""
    ms = row["ms"]
    if ms is None:
        return dict.fromkeys(("layers_ms", "layers_tokens_per_s", "model_speedup"))
    part = args.layers / args.of
    return {
        "layers_ms": args.layers * ms,
        "layers_tokens_per_s": row["batch"] / (args.layers * ms) * 1e3,
        # Amdahl, for a model whose layers all cost what this one costs as transformers runs it.
        "model_speedup": None if base is None else 1 / (1 - part + part * ms / base),
    }


def verdict(
    args: argparse.Namespace,
    plan: Plan,
    scaling: list[dict],
    parts: list[dict],
    projected: list[dict],
    bandwidth: float,
) -> dict:
    """What bounds the layer now, and the distance to the goal, as numbers and, under ``text``, as
    lines."""
    data: dict[str, object] = {"bandwidth": bandwidth, "ranks": args.ranks, "goal": args.goal}
    lines: list[str] = []
    for found, said in (
        _bound(scaling),
        _largest_part(parts, plan.batches[0]),
        _allowed(args, projected, bandwidth),
        _reached(args, projected),
    ):
        data |= found
        lines += said
    return {**data, "text": lines}


def _bound(scaling: list[dict]) -> tuple[dict, list[str]]:
    """By what the recurrence is bound at the largest batch that was timed."""
    ours = [r for r in scaling if r["candidate"] == "gdn_ops" and r["ms"] is not None]
    if not ours:
        return {}, []
    last = ours[-1]
    sweep = last["gbps"] * last["ratio"]
    bound = "memory" if last["ratio"] <= 1.25 else "memory and work beside it"
    return {"bound_by": bound, "gbps": last["gbps"], "sweep_gbps": sweep}, [
        f"measured: at batch {last['batch']} the recurrence moves {last['gbps']:.3g} GB/s, "
        f"{100 / last['ratio']:.0f}% of the {sweep:.3g} GB/s of an in-place sweep: bound by "
        f"{bound}."
    ]


def _largest_part(parts: list[dict], batch: int) -> tuple[dict, list[str]]:
    """The part of our layer that takes the most of a step."""
    if not parts:
        return {}, []
    ours = {r["stage"]: r["gdn_ops"] for r in parts}
    fused = ("input projection", "conv to norm in one call", "output projection")
    most = max(fused, key=ours.__getitem__)
    share = ours[most] / sum(ours[s] for s in fused)
    return {"largest_part": most}, [
        f"measured: at batch {batch} and hidden {PARTS_HIDDEN} the largest part of our layer is "
        f"'{most}', {share * 100:.0f}%."
    ]


def _exact(rows: list[dict]) -> list[dict]:
    return [r for r in rows if "lowrank" not in r["form"]]


def _allowed(
    args: argparse.Namespace, projected: list[dict], bandwidth: float
) -> tuple[dict, list[str]]:
    """The forms whose state traffic allows the most tokens a second."""

    def most(rows: list[dict]) -> dict:
        return max(rows, key=lambda r: r["tokens_per_s_bound"])

    exact, best = most(_exact(projected)), most(projected)
    where = "measured here" if args.bandwidth is None else "given"
    return {"best_exact": exact, "best_any": best}, [
        f"projected: at {bandwidth / 1e9:.4g} GB/s ({where}) a device and {args.ranks} device(s), "
        f"the state traffic of {args.layers} layers allows "
        f"{exact['tokens_per_s_bound']:.4g} tokens/s "
        f"({exact['form']}, {exact['state']}): {exact['of_goal']:.3g} times the goal of "
        f"{args.goal:g}. With an approximation {best['tokens_per_s_bound']:.4g} "
        f"({best['form']}, {best['state']})."
    ]


def _reached(args: argparse.Namespace, projected: list[dict]) -> tuple[dict, list[str]]:
    """The forms that ran fastest here."""
    data, lines = {}, []
    reached = [r for r in projected if r["tokens_per_s_here"] is not None]
    exact = _exact(reached)
    for key, what, rows in (
        ("here_exact", "exact", exact),
        ("here_with", "with an approximation", [r for r in reached if r not in exact]),
    ):
        if not rows:
            continue
        data[key] = top = max(rows, key=lambda r: r["tokens_per_s_here"])
        speed = top["tokens_per_s_here"]
        lines.append(
            f"measured here, {what}: the recurrence of {args.layers} layers alone runs at "
            f"{speed:.4g} tokens/s at batch {top['batch_here']} ({top['form']}, {top['state']}), "
            f"{speed / args.goal:.3g} times the goal."
        )
    return data, lines
