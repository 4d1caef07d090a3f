"""What the kernels cost, counted by the twin: bytes against the floor, instructions, balance."""

import functools

import pytest
import torch

from gdn_ops.bench import xpu as bench

record = functools.cache(bench.record)


def per_chunk(r):
    """Vector instructions, all of the launch, per 32 state elements."""
    return 32 * r["vector_instructions"] / r["state_elements"]


@pytest.mark.parametrize("heads", bench.HEADS)
def test_recurrent_at_batch_256(heads):
    r = record("recurrent", 256, *heads)
    assert r["dma_bytes"] <= 1.06 * r["floor_bytes"]
    assert r["dma_bytes"] >= r["floor_bytes"], "moved less than the floor: the floor is wrong"
    assert per_chunk(r) <= 17
    assert r["core_work_max"] <= 1.05 * r["core_work_mean"]
    assert r["lm_high_water"] <= 7500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_state_dtypes_move_little_more_than_the_floor(dtype):
    r = record("recurrent", 64, state_dtype=dtype)
    assert r["dma_bytes"] <= 1.06 * r["floor_bytes"]
    assert r["core_work_max"] <= 1.05 * r["core_work_mean"]


def test_batch_1_uses_the_chip():
    assert record("recurrent", 1)["cores_active"] >= 700
    assert record("decode", 1)["cores_active"] >= 700


@pytest.mark.parametrize("value_heads", [6, 12, 48])
@pytest.mark.parametrize("batch", [1, 3, 16, 40, 100])
def test_work_is_spread_at_every_batch(batch, value_heads):
    r = record("recurrent", batch, value_heads // 3, value_heads)
    # Rows cannot be cut: one row more than the mean is the finest spread there is.
    rows = batch * value_heads * bench.V / 768
    slack = max(1.1, -(-rows // 1) / rows + 0.05)
    assert r["core_work_max"] <= slack * r["core_work_mean"]


def test_windows_move_the_bytes_they_promise():
    full = record("recurrent", 256, 2, 6)["dma_bytes"]
    assert record("recurrent_buffered", 256, 2, 6)["dma_bytes"] <= 0.62 * full
    assert record("recurrent_lowrank", 256, 2, 6)["dma_bytes"] <= 0.20 * full


def test_three_calls_stand_for_a_fold_cycle(monkeypatch):
    """Every count grows evenly between folds, so the mean over a cycle needs no more calls."""
    short = bench.record("recurrent_buffered", 4, 2, 6, window=8)
    monkeypatch.setattr(bench, "_cycle", lambda R: dict.fromkeys(range(1, R + 1), 1.0))
    assert bench.record("recurrent_buffered", 4, 2, 6, window=8) == short


@pytest.mark.parametrize("heads", bench.HEADS)
def test_decode_moves_no_intermediate(heads):
    r = record("decode", 256, *heads)
    B, (H, HV), K, V = 256, heads, bench.K, bench.V
    C = 2 * H * K + HV * V
    conv = 2 * B * C * (bench.W - 1) * 2
    projection = B * (C + HV * V + 2 * HV) * 2
    output = B * HV * V * 2
    assert r["dma_bytes"] <= 1.04 * (
        record("recurrent", B, H, HV)["dma_bytes"] + conv + projection + output
    )


def test_time_model_takes_the_larger_of_bytes_and_instructions():
    r = {"dma_bytes": 24e9, "core_work_max": 5e6}
    slow = bench.model_seconds(r, rate=1e9)
    assert slow == {"model_memory_s": 0.01, "model_compute_s": 0.005, "model_s": 0.01}
    assert bench.model_seconds(r, rate=1e8)["model_s"] == 0.05
