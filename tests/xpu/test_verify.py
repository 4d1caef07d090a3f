"""``gdn-ops verify --device xpu-twin``: the calls of the CPU's rows, on the twin."""

import json

import pytest

pytest.importorskip("rich", reason="the command line needs rich")
from gdn_ops import xpu_twin
from gdn_ops.cli import main

ARGS = ("verify", "--device", "xpu-twin", "--dtype", "f32", "--state", "f32")


def verify(capsys, *args: str) -> tuple[int, dict, str]:
    code = main([*ARGS, *args, "--json", "-"])
    streams = capsys.readouterr()
    return code, json.loads(streams.out), streams.err


def test_rows_and_refusals(capsys):
    xpu_twin.reports()
    code, data, text = verify(capsys, "recurrent", "window_flush")
    assert code == 0 and xpu_twin.reports()  # the twin's kernels ran
    assert {r["op"] for r in data["rows"]} == {"recurrent", "window_flush"}
    assert {r["op"] for r in data["refused"]} == {"window_flush"}
    assert "K = 100" in data["refused"][0]["why"] and "refused: window_flush" in text
    assert "xpu-twin" in data["machine"]["device"]


def test_a_broken_kernel_is_out_of_tolerance(capsys):
    assert verify(capsys, "recurrent")[0] == 0
    # One instruction after the other replaced by another of its form, until one counts here: the
    # places are those of all kernels that this process has run.
    places = [site for site in xpu_twin.sites() if site.startswith("asm-other vector.h:")]
    failed = False
    try:
        for place in places:
            xpu_twin.set_mutation(place)
            code, data, text = verify(capsys, "recurrent")
            failed = not all(r["ok"] for r in data["rows"])
            assert code == failed and ("OUT OF TOLERANCE" in text) == failed
            if failed:
                break
    finally:
        xpu_twin.set_mutation("")
    assert failed
