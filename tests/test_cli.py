"""The command line: what each command prints, writes and returns."""

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gdn_ops
from gdn_ops import _tolerance, bench, cli
from gdn_ops.bench import _timing

pytest.importorskip("rich", reason="the command line needs rich")
from rich.console import Console

from gdn_ops.cli import COMMANDS, _projection, main
from gdn_ops.cli._output import Output


def run_json(capsys, *args: str) -> tuple[int, dict]:
    """A command with its JSON on stdout, and nothing but JSON there."""
    code = main([*args, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_python_m_and_json_alone_on_stdout():
    done = subprocess.run(
        [sys.executable, "-m", "gdn_ops", "verify", "gating", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "verify"
    assert "within tolerance" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_its_options(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text and "--threads" in text


def test_usage_errors_return_2(capsys):
    assert main(["verify", "no_such_op"]) == 2
    assert "there are: recurrent" in capsys.readouterr().err
    assert main(["bench", "no_such_family"]) == 2
    assert "recurrent" in capsys.readouterr().err
    assert main(["bench", "recurrent", "--heads", "4/6"]) == 2
    assert "multiple of key heads" in capsys.readouterr().err


def refused(capsys, *args: str) -> str:
    """What a command says that refuses its arguments, with status 2 and before it runs."""
    try:
        assert main([*args]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize(
    "args, says",
    [
        ("doctor --threads 0", "at least 1"),
        ("doctor --threads two", "whole number"),
        ("doctor --threads 100000000", "at most 1024"),
        ("doctor --json no/such/directory/x.json", "no directory"),
        ("doctor --json .", "a path to write to"),
        ("demo --tokens 1", "at least 2"),
        ("demo --batch 0", "at least 1"),
        ("demo --hidden -5", "at least 1"),
        ("demo --seed 1.5", "whole number"),
        ("verify gating --seed 99999999999999999999999", "at most"),
        ("verify gating --state f64", "expected some of f32"),
        ("verify gating --precision exact,quick", "expected some of exact, fast, auto"),
        ("verify --lowrank --text LATIN1", "can't decode"),
        ("verify --drift 0", "at least 1"),
        ("verify gating --drift 5", "OP has no use in --drift"),
        ("verify --drift 5 --precision fast", "--precision has no use in --drift"),
        ("verify --drift 5 --lowrank", "two runs"),
        ("verify --text README.md", "--text has no use in a comparison of ops"),
        ("bench recurrent --batch 0", "expected at least 1"),
        ("bench recurrent --batch 1,-4", "expected at least 1"),
        ("bench recurrent --batch one", "whole numbers, got 'one'"),
        ("bench recurrent --heads 2/0", "multiple of key heads"),
        ("bench recurrent --heads 16", "key/value heads, like 16/48"),
        ("bench recurrent --heads 16/", "whole numbers, got ''"),
        ("bench recurrent --state f64", "expected some of f32"),
        ("bench --device xpu-twin --rate 0", "above 0"),
        ("bench --device xpu-twin --bandwidth nan", "above 0"),
        ("bench recurrent --batch 1 --plot x.png", "two batch sizes"),
        ("bench recurrent --plot x.doc", "ends in one of"),
        ("bench recurrent --plot no/such/directory/x.png", "no directory"),
        ("explore --of 0", "at least 1"),
        ("explore --layers 5 --of 4", "at most --of 4"),
        ("explore --batch 4,0", "expected at least 1"),
        ("explore --ranks 0", "at least 1"),
        ("explore --quick --batch 99999999999999999999", "at most 2147483647"),
        ("bench recurrent --heads 1/99999999999999999999", "at most 2147483647"),
        ("demo --hidden 99999999999999999999", "at most 2147483647"),
        ("explore --goal 0", "above 0"),
        ("explore --bandwidth inf", "above 0"),
    ],
)
def test_unfit_arguments_are_refused_before_anything_runs(
    capsys, monkeypatch, tmp_path, args, says
):
    if "--plot" in args:
        pytest.importorskip("matplotlib")
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes(b"\xe9t\xe9")
    args = args.replace("LATIN1", str(latin1))
    monkeypatch.setattr(bench, "machine", lambda: pytest.fail("it ran"))
    assert says in refused(capsys, *args.split())


@pytest.mark.parametrize(
    "args", ["verify gating --dtype", "verify gating --precision", "bench recurrent --batch",
             "bench recurrent --state", "explore --windows", "explore --heads"],
)  # fmt: skip
def test_an_empty_list_is_not_the_default(capsys, monkeypatch, args):
    """As a shell makes one of a variable that is not set."""
    monkeypatch.setattr(bench, "machine", lambda: pytest.fail("it ran"))
    assert "got ''" in refused(capsys, *args.split(), "")


def test_a_result_that_cannot_be_written_says_so(capsys, monkeypatch, tmp_path):
    """And leaves what was there before, and nothing beside it."""
    path = tmp_path / "x.json"
    path.write_text("before")

    def some_of_it(self, data):
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError("full")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", some_of_it)
        assert main(["bench", "--list", "--json", str(path)]) == 2
    assert "--json: full" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert main(["bench", "--list", "--json", str(link)]) == 0
    assert link.is_symlink() and json.loads(path.read_text())["command"] == "bench"


def shell(redirect: str, *args: str, **environment: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command of the shell: ``"$@" REDIRECT`` of this one."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {redirect}', "bash", sys.executable, "-m",
         "gdn_ops", *args],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def test_nobody_reads_on():
    assert shell("| true", "doctor") == (141, "", "")
    assert shell("2> /dev/null | true", "doctor", "--json")[0] == 141


@full_disk
def test_a_full_disk_is_said_in_a_line():
    says = "gdn-ops doctor: cannot write its output: No space left on device\n"
    assert shell("> /dev/full", "doctor") == (2, "", says)
    code, _, error = shell("> /dev/full", "doctor", "--json")
    assert code == 2 and error.endswith(says)  # after the tables
    code, _, error = shell("> /dev/null", "doctor", "--json", "/dev/full")
    assert code == 2 and error.startswith("gdn-ops doctor: --json: ")


def test_a_closed_stream(tmp_path):
    path = tmp_path / "x.json"
    assert shell(">&-", "bench", "--list", "--json", str(path)) == (0, "", "")
    data = json.loads(path.read_text())
    # The text has nowhere to go; the JSON stays alone.
    assert json.loads(shell("2>&-", "bench", "--list", "--json")[1]) == data
    assert shell("2>&-", "verify", "no_such_op") == (2, "", "")


@full_disk
def test_a_picture_that_cannot_be_written_leaves_the_figures(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_timing, "WALK_BYTES", 2**22)
    picture = tmp_path / "x.png"
    picture.symlink_to("/dev/full")
    code, data = run_json(
        capsys, "bench", "recurrent", "--quick", "--heads", "2/6", "--batch", "1,2", "--state",
        "bf16", "--no-peers", "--plot", str(picture),
    )  # fmt: skip
    assert code == data["status"] == 2 and data["rows"]


def test_too_little_memory_is_said_in_a_line(capsys, monkeypatch):
    from gdn_ops.bench import recurrent

    monkeypatch.setattr(recurrent, "run", lambda options: torch.empty(2**62, dtype=torch.int8))
    assert main(["bench", "recurrent"]) == 2
    assert "gdn-ops bench: not enough memory: " in capsys.readouterr().err
    monkeypatch.setattr(recurrent, "run", lambda options: torch.empty(2**31, 2**31, 2**31))
    assert main(["bench", "recurrent"]) == 2
    assert "gdn-ops bench: not enough memory: " in capsys.readouterr().err

    def full(options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB.\nAnd more.")

    monkeypatch.setattr(recurrent, "run", full)
    assert main(["bench", "recurrent"]) == 2
    assert capsys.readouterr().err.endswith("out of memory. Tried to allocate 3 TiB.\n")


def test_a_family_that_needs_transformers_says_why_it_is_skipped(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, data = run_json(capsys, "bench", "layer", "--quick")
    (row,) = data["rows"]
    assert code == 0 and row["skipped"].startswith("transformers is not usable")


@pytest.mark.parametrize("command", ["demo", "verify --lowrank"])
def test_commands_that_need_transformers_say_so(capsys, monkeypatch, command):
    for name in [n for n in sys.modules if n.startswith(("transformers", "gdn_ops.hf"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert main(command.split()) == 2
    assert "pip install 'transformers>=5.17'" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["GDN_CPU_ISA", "GDN_PRECISION"])
def test_wrong_environment_is_said_in_a_line(variable):
    done = subprocess.run(
        [sys.executable, "-m", "gdn_ops", "doctor"],
        env={**os.environ, variable: "bogus"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"gdn-ops doctor: {variable}: expected") and not done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"gdn-ops {gdn_ops.__version__}\n"


@pytest.mark.parametrize("package", ["rich", "packaging"])
def test_a_package_that_is_not_there_is_named(capsys, monkeypatch, package):
    """torch brings neither: without packaging `doctor` used to end in a traceback."""
    found = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == package else found(name))
    assert main(["doctor"]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_a_terminal_that_knows_only_ascii():
    """A spinner of Braille dots used to end the command there."""
    out = Output(None)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    out.console = Console(file=terminal, force_terminal=True)
    with out.progress("counting", total=2) as status:
        status("one")
    out.table("numbers", ["n"], [["1"]])
    terminal.flush()
    assert b"counting" in terminal.buffer.getvalue()


def test_a_narrow_terminal_gets_lines():
    """Columns of one letter each, which is what 40 columns left of the table of `verify`."""
    columns = ["op", "tensor", "largest error", "verdict"]
    row = ["recurrent_buffered", "state", "1.25e-07", "out of tolerance"]

    def shown(width: int, *rows: list[str], head: list[str] = columns) -> str:
        out = Output(None)
        terminal = io.StringIO()
        out.console = Console(file=terminal, force_terminal=True, width=width, no_color=True)
        out.table("errors", head, list(rows))
        return re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue())

    text = shown(40, row)
    assert max(map(len, text.splitlines())) <= 40
    assert " ".join(text.split()) == (
        "errors - op recurrent_buffered, tensor state, largest error 1.25e-07, verdict out of "
        "tolerance"
    )
    assert "- threads: 2" in shown(12, ["threads", "2"], head=["what", "value"])
    for text in (shown(80, row), shown(40, ["threads", "2"], head=["what", "value"])):
        assert "┃" in text


def test_an_interrupt_before_the_command_runs(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert main(["verify"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_doctor_reports_what_runs_here(capsys):
    code, data = run_json(capsys, "doctor")
    assert code == int(bool(data["problems"]))
    native = data["native"]
    assert native["cpu_isa"] == gdn_ops.backends()["cpu"]["active"]
    assert native["cpu_isa"] in native["cpu_isas_usable"]
    assert "scalar" in native["cpu_isas_usable"]
    assert "CPU" in native["ops"]["recurrent"]
    assert {p["name"] for p in data["packages"]} >= {"torch", "transformers"}
    assert all(p["get"] for p in data["packages"] if not p["ok"])


@pytest.mark.parametrize("seen", [True, False])
def test_doctor_of_a_kunlun_build_asks_for_a_device_and_not_for_nvcc(monkeypatch, seen):
    from gdn_ops.cli import doctor

    monkeypatch.setattr("torch.cuda.is_available", lambda: seen)
    notes = doctor._backend_notes({"built_backends": ["cpu", "xpu"]})
    assert [n["backend"] for n in notes] == ([] if seen else ["xpu (Kunlun)"])


def test_doctor_names_the_isa_that_is_forced():
    done = subprocess.run(
        [sys.executable, "-m", "gdn_ops", "doctor", "--json", "-"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**__import__("os").environ, "GDN_CPU_ISA": "scalar"},
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert data["native"]["cpu_isa"] == "scalar"
    assert done.returncode == 1 and any("scalar" in p for p in data["problems"])


def test_verify_passes_and_fails(capsys, monkeypatch, tmp_path):
    args = ("verify", "gating", "recurrent", "--dtype", "f32", "--state", "f32,bf16")
    code, data = run_json(capsys, *args)
    assert code == 0
    rows = data["rows"]
    assert {r["op"] for r in rows} == {"gating", "recurrent"}
    assert {r["precision"] for r in rows if r["state"] == "bf16"} == {"exact", "fast", "auto"}
    assert all(r["of_tolerance"] <= 1 for r in rows)

    right = gdn_ops.gating
    monkeypatch.setattr(gdn_ops, "gating", lambda *a: tuple(t * 1.0001 for t in right(*a)))
    path = tmp_path / "out.json"
    assert main(["verify", "gating", "--dtype", "f32", "--json", str(path)]) == 1
    assert "OUT OF TOLERANCE" in capsys.readouterr().out
    assert not all(r["ok"] for r in json.loads(path.read_text())["rows"])


def test_verify_restores_the_precision(capsys):
    gdn_ops.set_precision("auto")
    try:
        main(["verify", "recurrent_gated", "--dtype", "f32", "--state", "f16"])
        assert gdn_ops.get_precision() == "auto"
    finally:
        gdn_ops.set_precision("exact")


def test_a_device_that_is_not_there_is_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gdn_ops.xpu_twin, "available", lambda: False)
    for device, says in (("cuda", "--device cuda: "), ("xpu-twin", "GDN_BACKEND=xpu-twin")):
        assert main(["verify", "--device", device]) == 2
        assert says in capsys.readouterr().err
    assert main(["verify", "--lowrank", "--device", "cuda"]) == 2
    assert "--device has no use in --lowrank" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device")
def test_verify_on_cuda(capsys):
    from gdn_ops.cli._cases import CASES

    code, data = run_json(capsys, "verify", "--device", "cuda")
    assert code == 0, [r for r in data["rows"] if not r["ok"]]
    assert data["machine"]["device"] == torch.cuda.get_device_name()
    assert {r["op"] for r in data["rows"]} == set(CASES)


def test_every_public_op_is_verified():
    from gdn_ops.cli._cases import CASES

    plain = {n for n in gdn_ops.__all__ if hasattr(torch.ops.gdn, n)}
    assert plain - set(CASES) <= {"get_precision", "set_precision"}


def test_bench_prints_time_floor_ratio_and_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    code, data = run_json(
        capsys, "bench", "recurrent", "--quick", "--heads", "2/6", "--batch", "1,2",
        "--state", "f32", "--no-peers", "--plot", str(picture),
    )  # fmt: skip
    assert code == 0
    rows = data["rows"]
    assert {(r["batch"], r["layout"]) for r in rows} == {
        (b, s) for b in (1, 2) for s in ("VK", "KV")
    }
    for row in rows:
        assert row["ms"] > 0 and row["floor_ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
        assert row["error"] <= 1
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_two_batches_is_refused(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    from gdn_ops.cli import _plot
    from gdn_ops.cli._output import UsageError

    with pytest.raises(UsageError, match="two batch sizes"):
        _plot.scaling([], bench.machine(), str(tmp_path / "x.png"))


def test_the_floor_in_a_plot_is_that_of_the_first_candidate(monkeypatch, tmp_path):
    """One that moves fewer bytes has a lower floor, which says nothing about the first."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from gdn_ops.cli import _plot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    rows = [
        {"op": "decode", "candidate": name, "batch": b, "ms": 2 * floor * b, "floor_ms": floor * b,
         "skipped": ""}
        for b in (1, 2) for name, floor in (("full", 3.0), ("low rank", 1.0))
    ]  # fmt: skip
    _plot.scaling(rows, bench.machine(), str(tmp_path / "x.png"))
    (axis,) = pyplot.gcf().axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert drawn == {"full": [6, 12], "floor of full": [3, 6], "low rank": [2, 4]}


def small_case(candidates, n=2):
    pools = [torch.zeros(4096) for _ in range(n)]
    case = {"family": "test", "op": "copy"}
    return _timing.measure(case, candidates, pools, 2 * 4096 * 4, bench.Options(quick=True))


def test_wrong_candidate_is_not_timed():
    calls = []
    wrong = bench.Candidate("wrong", calls.append, check=lambda: 3.0)
    nan = bench.Candidate("nan", calls.append, check=lambda: float("nan"))
    absent = bench.Candidate("absent", skipped="not installed")
    right = bench.Candidate("right", lambda i: None, check=lambda: 0.5)
    rows = {r["candidate"]: r for r in small_case([wrong, nan, absent, right])}
    assert not calls
    assert rows["wrong"]["ms"] is None and "3 times the tolerance" in rows["wrong"]["skipped"]
    assert rows["nan"]["ms"] is None and rows["nan"]["skipped"].startswith("not timed")
    assert rows["absent"]["skipped"] == "not installed" and rows["absent"]["ratio"] is None
    assert rows["right"]["ms"] > 0 and not rows["right"]["skipped"]


def test_candidates_share_one_walk():
    """No candidate may find its buffer warm from the one timed before it."""
    seen = []
    candidates = [bench.Candidate(name, seen.append) for name in ("a", "b")]
    small_case(candidates, n=7)
    # The sweep takes its turns in the same walk, so steps differ; but neither stays in one place.
    assert set(seen) == set(range(7))


def test_sweep_leaves_the_pool_as_it_was():
    for dtype in _timing.DTYPES.values():
        pool = torch.randn(3, 1000).to(dtype)
        before = pool.clone()
        for sweep in _timing.sweeps([pool]):
            sweep.call(0)
        assert torch.equal(pool, before)


def test_scaled_error():
    want = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert _tolerance.scaled_error(want.float(), want, 1e-6, 1e-6) == 0
    assert _tolerance.scaled_error(torch.tensor([1.0, float("nan")]), want, 1, 1) == float("inf")
    tiny = want * 1e-6
    assert _tolerance.scaled_error((tiny * 1.01).float(), tiny, 1e-3, 1e-3) > 1
    assert _tolerance.scaled_error(torch.empty(0), torch.empty(0, dtype=torch.float64), 1, 1) == 0


@pytest.fixture(scope="module")
def cuda_timing():
    path = Path(__file__).parent.parent / "benchmarks" / "cuda_timing.py"
    spec = importlib.util.spec_from_file_location("cuda_timing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_device_that_gives_nan_is_not_timed(cuda_timing):
    want = torch.tensor([1.0, -2.0])
    assert cuda_timing.relative_error(want * 1.5, want) == 0.5
    assert cuda_timing.relative_error(torch.tensor([1.0, float("nan")]), want) == float("inf")


def test_families_are_found_by_name():
    names = bench.families()
    assert {"recurrent", "layer"} <= set(names)
    for name in names:
        module = bench.family(name)
        assert callable(getattr(module, "run", None) or module.records)


@pytest.mark.parametrize("peer", ["einsum", "transformers", "onnxruntime"])
def test_peers_agree_with_the_oracle(peer):
    """A peer that computes something else would make its time worthless."""
    from gdn_ops.bench import recurrent

    inputs = recurrent.Inputs(3, 2, 6, torch.bfloat16, 0)
    pools = [recurrent.fill_pool((3, 6, 128, 128), torch.float32, 0)]
    candidate = {
        "einsum": recurrent.einsum,
        "transformers": lambda *a: recurrent.transformers_peer(*a, compiled=False),
        "onnxruntime": recurrent.onnxruntime_peer,
    }[peer](inputs, pools)
    if candidate.skipped:
        pytest.skip(candidate.skipped)
    assert candidate.check() <= 1


def test_a_rule_without_groups_of_heads_gets_them():
    from gdn_ops.bench._transformers import grouped

    def product(q, k, v, **gates):
        return q * k * v

    q, v = torch.rand(1, 1, 2, 3), torch.rand(1, 1, 4, 3)
    want = q.repeat_interleave(2, 2) ** 2 * v
    assert torch.equal(grouped(product)(q, q, v), want)

    def groups(q, k, v, **gates):
        return product(*(t.repeat_interleave(2, 2) for t in (q, k)), v)

    assert grouped(groups) is groups


def test_demo_tokens_are_equal(capsys):
    pytest.importorskip("transformers")
    code, data = run_json(capsys, "demo", "--no-compile", "--tokens", "12", "--hidden", "64")
    assert code == 0 and data["verdict"] is True
    assert {r["candidate"] for r in data["generation"]} == {"transformers", "gdn_ops"}
    assert all(v.startswith("gdn_ops") for v in data["active"].values())
    stages = [r["stage"] for r in data["layer"]["eager"]]
    assert stages[:6] == [
        "input projection", "conv", "gating", "recurrence", "norm", "output projection",
    ]  # fmt: skip
    for row in data["layer"]["eager"][:6]:
        assert row["transformers"] > 0 and row["gdn_ops"] > 0


def test_explore_says_when_the_machine_was_disturbed():
    """The first family of a run was slowed down eight times, the second not."""

    def row(candidate, gbps, ratio=1.0):
        return {"candidate": candidate, "state": "f32", "batch": 16, "ms": 1.0} | {
            "gbps": gbps, "ratio": ratio,
        }  # fmt: skip

    quiet = _projection.sweeps([row("gdn_ops", 70.0, 1.2)], [row("recurrent", 80.0)])
    assert quiet == {16: [84e9, 80e9]} and _projection.disturbance(quiet) is None
    slow = _projection.sweeps([row("gdn_ops", 12.0)], [row("recurrent", 80.0)])
    assert "at 12 and at 80 GB/s" in _projection.disturbance(slow)


def test_explore_prints_every_table_and_the_verdict(capsys, monkeypatch, tmp_path):
    """A tiny matrix: each table says what it is, and the projection follows from bytes alone."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_timing, "WALK_BYTES", 2**22)
    plot = tmp_path / "explore.png"
    code, data = run_json(
        capsys, "explore", "--quick", "--batch", "1,2", "--heads", "2/6", "--state", "f32,bf16",
        "--precision", "exact,fast", "--windows", "8", "--no-compile", "--bandwidth", "1e12",
        "--ranks", "2", "--plot", str(plot),
    )  # fmt: skip
    assert code == 0 and plot.stat().st_size > 10_000
    kinds = {name: data[name]["kind"] for name in TABLES}
    assert kinds == dict.fromkeys(TABLES, "measured") | {"throughput": "projected"}
    assert all(data[name]["rows"] for name in TABLES)
    ours = [r for r in data["scaling"]["rows"] if r["candidate"] == "gdn_ops"]
    assert [r["batch"] for r in ours] == [1, 2]
    assert all(r["error"] <= 1 and r["ratio"] > 0 for r in ours)
    assert all(abs(r["layers_ms"] - 48 * r["ms"]) < 1e-9 and r["model_speedup"] > 0 for r in ours)
    forms = {(r["candidate"], r["state"], r["precision"]) for r in data["matrix"]["rows"]}
    assert ("recurrent_lowrank R=8", "f32", "exact") in forms
    assert ("recurrent_buffered R=8", "bf16", "fast") in forms
    worst = {r["g"]: r["rel_l2"] for r in data["lowrank"]["rows"]}
    assert worst["uniform in (-0.5, 0)"] > worst["uniform in (-3, 0)"] > 0
    full = next(r for r in data["throughput"]["rows"] if r["form"] == "recurrent")
    state = 2 * 6 * 128 * 128 * 4
    activations = 2 * (2 * 2 * 128 + 2 * 6 * 128) + 4 * (6 + 6) + 4
    assert full["mb_per_token"] == pytest.approx(48 * (state + activations) / 1e6)
    assert full["tokens_per_s_bound"] == pytest.approx(2 * 1e12 / (48 * (state + activations)))
    assert any("times the goal" in line for line in data["verdict"]["text"])


def test_explore_says_how_far_it_is_and_prints_what_it_has(capsys, monkeypatch):
    """The last case is the one that was announced; a table does not wait for the next ones."""
    monkeypatch.setattr(_timing, "WALK_BYTES", 2**22)
    options = "--quick --batch 1,2 --heads 2/6 --state f32,bf16 --windows 4,8 --no-peers"
    assert main(["explore", *options.split()]) == 0
    text = capsys.readouterr().out
    # Two batches: the recurrence, two R beside float32, one R in each mode beside bfloat16.
    cases = [int(n) for n in re.findall(r"\.\.\. case (\d+) of 12, \d+ s: ", text)]
    assert cases == sorted(cases) and set(cases) == set(range(1, 13))
    assert text.index("batch scaling") < text.index("case 3 of 12")


TABLES = ("implementations", "scaling", "matrix", "parts", "lowrank", "throughput")


@pytest.mark.parametrize(
    "options, says",
    [
        (("--precision", "quick"), "--precision"),
        (("--ranks", "3"), "--ranks"),
        (("--windows", "65"), "--windows"),
        (("--heads", "2/6,4/12"), "--heads"),
    ],
)
def test_explore_refuses(capsys, options, says):
    assert main(["explore", *options]) == 2
    assert says in capsys.readouterr().err


def test_verify_lowrank_on_a_models_activations(capsys):
    pytest.importorskip("transformers", reason="the model comes from transformers")
    code, data = run_json(capsys, "verify", "--lowrank", "--tokens", "96")
    assert code == 0
    rows = data["rows"]
    assert {r["layer"] for r in rows} == {0, 1, 2}  # of four layers one is attention
    for layer in range(3):
        error = {r["R"]: r["rel_l2"] for r in rows if r["layer"] == layer}
        assert list(error) == [8, 16, 32, 64]
        assert 1e-5 < error[64] < error[32] < error[16] < error[8] < 2
    assert all(r["worst_head"] >= r["rel_l2"] for r in rows)
    # A window as long as the text forgets nothing.
    _, data = run_json(capsys, "verify", "--lowrank", "--tokens", "64")
    assert all(r["worst_head"] < 1e-5 for r in data["rows"] if r["R"] == 64)
    assert main(["verify", "recurrent", "--lowrank"]) == 2
    assert main(["verify", "--lowrank", "--text", "no such file"]) == 2


def test_verify_lowrank_says_what_a_model_lacks(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the model comes from transformers")
    from gdn_ops.hf.tiny import tiny_model

    def said(folder: str, *options: str) -> str:
        command = ["verify", "--lowrank", "--model", str(tmp_path / folder), *options]
        assert main(command) == 2
        return capsys.readouterr().err

    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    llama = transformers.LlamaConfig(vocab_size=64, **sizes)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "llama")
    assert "--model: gdn_ops.patch: LlamaForCausalLM has no layer" in said("llama")
    tiny_model("qwen3_5").save_pretrained(tmp_path / "tiny")
    assert "expected at least 16 tokens to read, got 15" in said("tiny", "--tokens", "15")
    text = tmp_path / "text"
    text.write_text("words " * 100)
    # No tokenizer was saved: some transformers then make one that knows no word.
    assert re.search(
        "no tokenizer beside it|tokens to read, got 0", said("tiny", "--text", str(text))
    )
    weights = tmp_path / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "--model: expected a directory with a model" in said("tiny")


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs and events of a device that is not there: ``recorded`` are the calls that ran,
    each of a millisecond, and ``capturing`` is not empty inside a capture."""
    recorded, capturing = [], []

    class Graph:
        def replay(self):
            recorded.extend(self.calls)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(recorded)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return float(end.at - self.at)

    @contextlib.contextmanager
    def graph(g):
        before = len(recorded)
        capturing.append(g)
        try:
            yield
        finally:
            capturing.pop()
        g.calls = recorded[before:]
        del recorded[before:]

    for name, stub in (("CUDAGraph", Graph), ("Event", Event), ("graph", graph)):
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return recorded, capturing


def test_a_device_is_timed_by_graphs_of_the_whole_walk(graphs):
    recorded, capturing = graphs

    def refuses(i):
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        recorded.append(("host", i))

    candidates = [
        _timing.Candidate("ours", lambda i: recorded.append(("ours", i))),
        _timing.Candidate("host", refuses, note="a peer"),
    ]
    times = _timing._replays(candidates, 3, _timing.Options(quick=True))
    assert set(times) == {"ours", "host"}
    assert all(s == pytest.approx(1e-3) for samples in times.values() for s in samples)
    # Beside whole walks, one call of the first buffers before the capture.
    assert recorded.count(("ours", 0)) == recorded.count(("ours", 2)) + 1 > 2
    assert candidates[0].note == ""
    wanted = "a peer; not captured: operation not permitted when stream is capturing"
    assert candidates[1].note == wanted


def test_benchmarks_of_a_device_replay_one_graph(cuda_timing, graphs):
    recorded, _ = graphs
    calls = [functools.partial(recorded.append, name) for name in "abc"]
    seconds, spread = cuda_timing.graph_time(calls, repeats=2, least=4, before=calls[0])
    assert (seconds, spread) == (pytest.approx(1e-3), 0)
    assert recorded == ["a", "b", *4 * ["a", *"abcabc"]]  # `before` and its replay
    graph, result = cuda_timing.captured(lambda: recorded.append("d") or "its tensor")
    assert recorded[-2:] == ["d", "d"] and graph.calls == ["d"] and result == "its tensor"
