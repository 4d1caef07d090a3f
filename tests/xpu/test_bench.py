"""``gdn-ops bench --device xpu-twin``: what it prints, writes and refuses."""

import json

import pytest

pytest.importorskip("rich", reason="the command line needs rich")
from gdn_ops.cli import main

KEYS = {
    "op", "state_dtype", "batch", "heads", "value_heads", "dma_bytes", "floor_bytes",
    "vector_instructions", "state_elements", "core_work_max", "core_work_mean", "cores_active",
    "lm_high_water", "vectors_alive", "waits",
}  # fmt: skip


def bench(capsys, *args: str) -> tuple[list[dict], str]:
    assert main(["bench", "--device", "xpu-twin", *args, "--json", "-"]) == 0
    streams = capsys.readouterr()
    return json.loads(streams.out), streams.err


def test_json_is_a_list_of_records(capsys):
    rows, text = bench(capsys, "--batch", "1,2", "--heads", "2/6", "--state", "f16,f32")
    assert isinstance(rows, list) and all(r.keys() >= KEYS for r in rows)
    ops = ("recurrent", "recurrent_buffered", "recurrent_lowrank", "decode")
    assert {(r["op"], r["state_dtype"], r["batch"]) for r in rows} == {
        (op, dtype, batch) for op in ops for dtype in ("float16", "float32") for batch in (1, 2)
    }
    for r in rows:
        assert (r["heads"], r["value_heads"]) == (2, 6)
        assert r["state_elements"] == r["batch"] * 6 * 128 * 128
        assert r["dma_bytes"] >= r["floor_bytes"] > 0
        assert r["core_work_max"] >= r["core_work_mean"] > 0
        assert 0 < r["lm_high_water"] <= 8000 and 0 < r["cores_active"] <= 768
    assert "bytes/floor" in text and "balance" in text and "model" in text


def test_model_follows_the_assumed_rates(capsys):
    args = ("recurrent", "--batch", "1", "--heads", "2/6", "--rate", "2e6", "--bandwidth", "1e9")
    (row,), text = bench(capsys, *args)
    assert row["model_memory_s"] == pytest.approx(row["dma_bytes"] / 1e9)
    assert row["model_compute_s"] == pytest.approx(row["core_work_max"] / 2e6)
    assert row["model_s"] == max(row["model_memory_s"], row["model_compute_s"])
    assert "no measurement" in text and "1e+09 bytes/s" in text and "2e+06 a second" in text


def test_usage_errors(capsys):
    assert main(["bench", "--device", "xpu-twin", "layer"]) == 2
    assert "there are: recurrent, recurrent_buffered" in capsys.readouterr().err
    assert main(["bench", "xpu"]) == 2
    assert "use --device xpu-twin" in capsys.readouterr().err
    assert main(["bench", "--rate", "1e9"]) == 2
    assert "--device xpu-twin" in capsys.readouterr().err
    assert main(["bench", "--device", "xpu-twin", "--plot", "x.png"]) == 2
    assert "not plotted" in capsys.readouterr().err
