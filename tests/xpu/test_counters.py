"""What the kernels cost, counted by the twin: bytes against the floor, instructions, balance."""

import functools
import itertools

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


@pytest.mark.parametrize("op", bench.OPS)
def test_batch_1_uses_the_chip(op):
    r = record(op, 1)
    assert r["cores_active"] >= 700
    # Small pieces of a head do not each read the window's keys.
    share = {"recurrent": 1.0, "decode": 1.0, "recurrent_buffered": 0.72, "recurrent_lowrank": 0.25}
    assert r["dma_bytes"] <= share[op] * record("recurrent", 1)["dma_bytes"]


@pytest.mark.parametrize(
    ("batch", "value_heads"),
    [*itertools.product([1, 3, 16, 40, 100], [6, 12, 48]), (257, 12), (1024, 6)],
)
def test_work_is_spread_at_every_batch(batch, value_heads):
    r = record("recurrent", batch, value_heads // 3, value_heads)
    # Rows cannot be cut: one row more than the mean is the finest spread there is.
    rows = batch * value_heads * bench.V / 768
    slack = max(1.1, -(-rows // 1) / rows + 0.05)
    assert r["core_work_max"] <= slack * r["core_work_mean"]


@pytest.mark.parametrize("op", ["recurrent_buffered", "recurrent_lowrank"])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_windows_are_spread(op, batch):
    r = record(op, batch)
    assert r["cores_active"] == 768 and r["core_work_max"] <= 1.6 * r["core_work_mean"]


def test_windows_move_the_bytes_they_promise():
    full = record("recurrent", 256, 2, 6)["dma_bytes"]
    assert record("recurrent_buffered", 256, 2, 6)["dma_bytes"] <= 0.62 * full
    assert record("recurrent_lowrank", 256, 2, 6)["dma_bytes"] <= 0.20 * full


def test_three_calls_stand_for_a_fold_cycle(monkeypatch):
    """Every count grows evenly between folds, so the mean over a cycle needs no more calls."""
    short = bench.record("recurrent_buffered", 4, 2, 6, window=8)
    monkeypatch.setattr(bench, "_cycle", lambda R: dict.fromkeys(range(1, R + 1), 1.0))
    whole = bench.record("recurrent_buffered", 4, 2, 6, window=8)
    means = ("core_work_mean", "balance")
    assert {k: v for k, v in whole.items() if k not in means} == {
        k: v for k, v in short.items() if k not in means
    }
    assert whole["core_work_mean"] == pytest.approx(short["core_work_mean"], rel=1e-9)


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


def test_empty_chunks_cost_no_arithmetic():
    """Eight sequences have three slots a chunk; decay and inverse are made for real ones."""
    T, H, HV = 256, 1, 2
    counts = []
    for n in (1, 8):
        x = [bench._random(1, T, h, 64, dtype=torch.float16) for h in (H, H, HV)]
        gates = [bench._empty(1, T, HV, dtype=torch.float32) for _ in range(2)]
        cu = (torch.arange(n + 1) * (T // n)).to(x[0].device)
        pool = bench._empty(n, HV, 64, 64, dtype=torch.float16)
        bench.xpu_twin.reports()
        with torch.no_grad():
            torch.ops.gdn.chunk_prefill(
                *x, *gates, pool, None, None, None, cu, None, None, True, 32
            )
        reports = bench.xpu_twin.reports()
        counts.append({r["kernel"]: r["vector"] for r in reports})
        assert max(r["lm_high_water"] for r in reports) <= 7500
    for kernel in ("chunk_decay", "chunk_solve"):
        assert 0 < counts[1][kernel] <= 1.1 * counts[0][kernel]
    assert counts[1]["chunk_rows"] > counts[0]["chunk_rows"]


def test_time_model_takes_the_larger_of_bytes_and_instructions():
    r = {"dma_bytes": 24e9, "core_work_max": 5e6}
    slow = bench.model_seconds(r, rate=1e9)
    assert slow == {"model_memory_s": 0.01, "model_compute_s": 0.005, "model_s": 0.01}
    assert bench.model_seconds(r, rate=1e8)["model_s"] == 0.05


@pytest.mark.parametrize("op", bench.OPS)
def test_a_core_waits_for_a_block_at_a_time(op):
    """Rows of 1 KB are in flight while others are computed: a fence a block, and a few a head."""
    r = record(op, 256, 2, 6)
    blocks = 256 * 6 * bench.V / 768 / 4
    assert r["waits"] <= {"recurrent": 1.1, "recurrent_lowrank": 1.0}.get(op, 3.2) * blocks


@pytest.mark.parametrize("op", bench.OPS)
def test_vectors_in_scope_and_arrays_fit_local_memory(op):
    """With 32 registers, an argument block in local memory, and what does not fit one beside it."""
    r = record(op, 256, 2, 6)
    arrays = r["lm_high_water"] - 1024
    assert arrays + 500 + 64 * max(0, r["vectors_alive"] - 32) <= 8000


def test_drafts_wait_once_a_token_and_block():
    """Four tokens a sequence, each state into a row of its own."""
    device, (B, T, H, HV) = bench.xpu_twin.device(), (32, 4, 2, 6)
    act = torch.float16

    def random(*shape):
        return torch.randn(*shape).to(act).to(device)

    q, k, v = random(B, T, H, bench.K), random(B, T, H, bench.K), random(B, T, HV, bench.V)
    gates = torch.zeros(B, T, HV, device=device)
    state = random(B * T, HV, bench.V, bench.K)
    index = torch.arange(B * T, dtype=torch.int32).view(B, T).to(device)
    accepted = torch.ones(B, dtype=torch.int32).to(device)
    bench.xpu_twin.reports()
    torch.ops.gdn.recurrent(q, k, v, gates, gates, state, index, None, None, accepted, None, True)
    (r,) = bench.xpu_twin.reports()
    blocks = B * HV * bench.V / 768 / 4
    assert r["core_waits_max"] <= blocks * T + 4
    rows = B * HV * bench.V * bench.K * 2
    floor = rows * (1 + T) + bench.nbytes(q, k, gates, gates) + 2 * bench.nbytes(v)
    assert floor <= r["load_bytes"] + r["store_bytes"] <= 1.05 * floor
