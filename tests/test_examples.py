"""Every script of examples/ runs, and says in its last line that what it shows is so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_ops

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Options that keep a run short, and what its last line must say.
SCRIPTS = {
    "decode_pool": ((), "9 requests"),
    "huggingface": (("--tokens", "6"), "are equal with and without"),
    "speculative": ((), "difference from one token after the other"),
    "lowrank_after_prefill": ((), "R = 32: relative error"),
    "compiled_layer": (("--backend", "aot_eager"), "the pool was not copied"),
}


def run(name: str, *options: str) -> str:
    # The package under test, installed or not.
    path = os.pathsep.join([str(Path(gdn_ops.__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_script_is_listed():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name):
    if name == "huggingface":
        pytest.importorskip("transformers")
    options, says = SCRIPTS[name]
    assert says in run(name, *options).splitlines()[-1]


def test_help_says_what_an_example_shows():
    assert "rollback" in run("speculative", "--help")
