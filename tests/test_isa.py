"""Every instruction set that this processor has, forced in turn in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import gdn_ops  # noqa: F401 - loads the ops

ALL = ("scalar", "avx2", "avx512", "avx512bf16", "amx", "neon")
SUITES = ["test_recurrent.py", "test_conv.py", "test_gates.py", "test_norm.py", "test_decode.py",
          "test_linear.py"]  # fmt: skip
# Of the families that take long, the tests that reach every kernel: all dtypes, whole and cut
# tiles, extreme gates, both layouts of a pool.
SUITES += [
    f"test_chunk.py::test_{name}"
    for name in (
        "sixteen_bit_lengths", "dtypes_and_ratios", "extreme_gates", "prefill_rows",
        "strided_views_equal_contiguous", "a_later_token_changes_no_earlier_output",
        "lowrank_window_dtypes", "lowrank_extreme_gates", "gradients_of_any_shape",
        "fast_head_dims", "fast_lengths", "fast_extreme_gates", "fast_prefill_rows", "fast_lowrank",
        "fast_a_later_token_changes_no_earlier_output",
        "auto_is_fast_where_it_pays_and_gradients_stay_exact",
    )
]  # fmt: skip
SUITES += [
    f"test_windows.py::test_{name}"
    for name in (
        "buffered_against_oracle", "lowrank_against_oracle", "packed_sequences", "extreme_gates",
        "speculate_accept_reject", "flush_and_reset", "decode_against_oracle",
    )
]  # fmt: skip
ROOT = os.path.dirname(os.path.dirname(__file__))


@pytest.mark.parametrize("isa", ALL)
def test_suite(isa):
    if isa not in torch.ops.gdn.cpu_isas():
        pytest.skip(f"this processor has no {isa}")
    if isa == torch.ops.gdn.cpu_isa():
        pytest.skip(f"{isa} is what the other tests of this run use")
    env = {**os.environ, "GDN_CPU_ISA": isa}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + [f"tests/{x}" for x in SUITES],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("value", ["sse9", "neon" if os.uname().machine == "x86_64" else "avx2"])
def test_unsupported_value_is_an_error(value):
    env = {**os.environ, "GDN_CPU_ISA": value}
    code = "import gdn_ops; print(gdn_ops.backends())"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode != 0 and "GDN_CPU_ISA" in run.stderr and value in run.stderr
