"""What docs/precision.md claims of long runs, in short: errors that stay where they were."""

from __future__ import annotations

import pytest
import torch

import gdn_ops

pytest.importorskip("rich", reason="the command line needs rich")
from gdn_ops.cli import _drift, main

STATES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def test_errors_do_not_grow():
    with torch.no_grad():
        rows = _drift.rows(300, {"f32": torch.float32}, STATES, 0, lambda _: None)
    assert len(rows) == 5 + 2 * 7  # beside 16 bits, windows of both dtypes
    last = {(r["mode"], r["state"]): r["last"] for r in rows}
    for r in rows:
        assert r["last"] <= 3 * r["first"], r  # the first tokens find an empty state
        limit = 1e-6 if r["state"] == "f32" else 4 * torch.finfo(STATES[r["state"]]).eps
        assert 0 < r["last"] <= limit, r
    for state in ("bf16", "f16"):  # rounded R times less often
        for kept in ("", ", window as the state"):
            few, many = (last[f"buffered R={R}{kept}", state] for R in (8, 16))
            assert many < few < last["full", state]


def test_a_drifting_op_is_reported(monkeypatch, capsys):
    assert main(["verify", "--drift", "20", "--dtype", "f32", "--state", "f32"]) == 0
    exact = gdn_ops.recurrent

    def drifting(*args):
        args[-1].mul_(1 + 1e-5)
        return exact(*args)

    monkeypatch.setattr(gdn_ops, "recurrent", drifting)
    assert main(["verify", "--drift", "20", "--dtype", "f32", "--state", "f32"]) == 1
    assert "DRIFTS" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["verify", "--drift", "0"])
    assert refused.value.code == 2
    assert "--drift: expected a whole number of at least 1, got '0'" in capsys.readouterr().err
