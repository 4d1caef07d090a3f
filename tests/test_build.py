"""What the build leaves behind: the library, its error messages, the archives."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

import gdn_ops
from gdn_ops import _native

PACKAGE = Path(gdn_ops.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
LIBRARY = next(iter(sorted(PACKAGE.glob("_C*.so"))))


def without_library(package: Path) -> None:
    for library in package.glob("_C*.so"):
        library.unlink()


def with_library_of_another_torch(package: Path) -> None:
    (package / "_build_info.py").write_text("TORCH_VERSION = '2.4.7'\nBACKENDS = ['cpu']\n")
    next(iter(package.glob("_C*.so"))).write_bytes(b"not a library")


def run_copy(tmp_path, change, *args: str, behind: str = "") -> subprocess.CompletedProcess:
    """Python that finds a copy of the package which ``change`` damaged, and ``behind`` it."""
    copy = tmp_path / "gdn_ops"
    if not copy.exists():
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        change(copy)
    return subprocess.run(
        [sys.executable, *args], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{behind}"}, check=False,
    )  # fmt: skip


def test_missing_library_says_how_to_build(tmp_path):
    done = run_copy(tmp_path, without_library, "-c", "import gdn_ops")
    assert done.returncode != 0
    assert "ImportError: gdn_ops: the native library is missing" in done.stderr
    paths = subprocess.run(  # not this process's, to which pytest and PYTHONPATH add the tree
        [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"], cwd=tmp_path,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}, check=True,
    ).stdout.split("\n")  # fmt: skip
    installed = any(any(Path(p, "gdn_ops").glob("_C*.so")) for p in paths if p)
    assert ("run Python elsewhere" if installed else _native.REBUILD) in done.stderr


def test_a_tree_that_hides_the_installed_package_says_so(tmp_path):
    """In the clone that the package was installed from, where rebuilding would not help."""
    args = (tmp_path, without_library, "-c", "import gdn_ops")
    done = run_copy(*args, behind=str(PACKAGE.parent))
    assert done.returncode != 0
    assert f"That of {PACKAGE} is not used" in done.stderr and _native.REBUILD not in done.stderr


def test_library_of_another_torch_names_both_versions(tmp_path):
    done = run_copy(tmp_path, with_library_of_another_torch, "-c", "import gdn_ops")
    assert done.returncode != 0
    assert "built for torch 2.4.7" in done.stderr and f"torch {torch.__version__}" in done.stderr
    assert _native.REBUILD in done.stderr


@pytest.mark.parametrize("started", ["-m gdn_ops", "gdn-ops"])
@pytest.mark.parametrize("change", [without_library, with_library_of_another_torch])
def test_the_command_without_a_library_says_it_in_words(tmp_path, change, started):
    """`doctor` is what one runs then: it reports, with status 1; the others cannot run."""
    script = tmp_path / "gdn-ops"
    script.write_text("import sys\nfrom gdn_ops.cli import main\nsys.exit(main())\n")
    started = started.split()
    problem = {without_library: "missing", with_library_of_another_torch: "built for torch 2.4.7"}

    done = run_copy(tmp_path, change, *started, "doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem: gdn_ops: the native library" in done.stdout
    assert problem[change] in done.stdout and f"torch: {torch.__version__}" in done.stdout

    done = run_copy(tmp_path, change, *started, "doctor", "--json")
    assert done.returncode == 1 and "problem: " in done.stderr
    data = json.loads(done.stdout)
    assert (data["command"], data["status"]) == ("doctor", 1)
    assert problem[change] in data["problems"][0]
    quiet = ["-c", "import os, sys; os.close(2); os.execv(sys.executable, sys.argv[1:])"]
    done = run_copy(tmp_path, change, *quiet, sys.executable, *started, "doctor", "--json")
    assert json.loads(done.stdout) == data  # and no text among it
    run_copy(tmp_path, change, *started, "doctor", "--json", "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == data

    done = run_copy(tmp_path, change, *started, "verify")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gdn-ops: gdn_ops: the native library")


@pytest.mark.parametrize("started", ["-m gdn_ops doctor", "gdn-ops verify", "-c 'import gdn_ops'"])
def test_an_interrupt_while_torch_is_imported(tmp_path, started):
    """The first seconds of every command; a program of one's own gets what it expects."""
    (tmp_path / "gdn-ops").write_text("from gdn_ops.cli import main\nmain()\n")
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = run_copy(tmp_path, lambda copy: None, *shlex.split(started))
    if "-c" in started:
        assert done.returncode < 0 and "KeyboardInterrupt" in done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_import_without_a_library_ends_no_process(tmp_path):
    code = "try: import gdn_ops\nexcept ImportError: print('went on')"
    done = run_copy(tmp_path, without_library, "-c", code, "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_build_info_is_of_this_torch():
    from gdn_ops import _build_info

    assert torch.__version__ == _build_info.TORCH_VERSION
    assert "cpu" in _build_info.BACKENDS


def copy_build(tmp_path) -> Path:
    """A tree with what setup.py reads and no sources; returns where it records a build."""
    for name in ("setup.py", "build_xpu.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    info = tmp_path / "gdn_ops" / "_build_info.py"
    info.parent.mkdir()
    return info


def run_build(tree, *args: str, compiler: str, **environment: str) -> int:
    """``setup.py build_ext`` with ``compiler`` in the place of BuildExtension.run."""
    code = (
        "import runpy, sys; from torch.utils.cpp_extension import BuildExtension; "
        f"BuildExtension.run = {compiler}; sys.argv[0] = 'setup.py'; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "-q", "build_ext", *args], cwd=tree, timeout=120,
        capture_output=True, env={**os.environ, "GDN_BACKEND": "none", **environment}, check=False,
    ).returncode  # fmt: skip


def test_build_info_is_of_the_library_beside_it(tmp_path):
    """A wheel, or a build that fails, leaves the tree's own library, and so what is said of it."""
    info, before = copy_build(tmp_path), "TORCH_VERSION = '2.4.7'\n"

    def build(*args: str, compiler: str = "lambda self: None") -> tuple[int, str]:
        info.write_text(before)
        return run_build(tmp_path, *args, compiler=compiler), info.read_text()

    assert build() == (0, before)
    (of_the_wheel,) = tmp_path.glob("build/lib*/gdn_ops/_build_info.py")
    assert repr(torch.__version__) in of_the_wheel.read_text()
    code, text = build("--inplace", compiler="lambda self: sys.exit('no compiler')")
    assert code != 0 and text == before
    code, text = build("--inplace")
    assert code == 0 and text == of_the_wheel.read_text()


@pytest.mark.parametrize("ninja", ["0", "1"])
def test_a_header_alone_is_built_anew(tmp_path, ninja):
    """Without ninja a build after a change in a header did nothing, as if it had."""
    copy_build(tmp_path)
    tell = "lambda self: sys.exit(7 if self.force else 8)"
    assert run_build(tmp_path, compiler=tell, GDN_NINJA=ninja) == 7


def test_an_installed_package_says_that_it_has_types(tmp_path):
    copy_build(tmp_path)
    for name in ("__init__.py", "py.typed"):
        shutil.copy(PACKAGE / name, tmp_path / "gdn_ops" / name)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py"], cwd=tmp_path, timeout=120, check=True,
        env={**os.environ, "GDN_BACKEND": "none"}, capture_output=True,
    )  # fmt: skip
    assert list(tmp_path.glob("build/lib*/gdn_ops/py.typed"))


def test_versions_agree():
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)[1]
    assert gdn_ops.__version__ == declared
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()
    # In a source tree that was built in place there is no metadata to compare.
    with contextlib.suppress(metadata.PackageNotFoundError):
        assert metadata.version("gdn-ops") == declared


def test_import_brings_no_module_of_others():
    """On top of torch: 40 to 70 ms here, which a heavy import would double."""
    code = (
        "import sys, torch; before = set(sys.modules); import gdn_ops; "
        "print(*(set(sys.modules) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    others = {m for m in run.stdout.split() if not m.startswith(("gdn_ops", "torch."))}
    assert not others


def test_modules_are_imported_when_they_are_asked_for():
    code = (
        "import sys, gdn_ops; assert 'gdn_ops.nn' not in sys.modules; "
        "print(gdn_ops.nn.GatedDeltaNet, gdn_ops.windows.allocate, gdn_ops.reference.chunk, "
        "gdn_ops.compat, gdn_ops.distributed.HeadParallel)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not hasattr(gdn_ops, "no_such_name")


@pytest.mark.parametrize("transformers", [True, False], ids=["transformers", "none"])
def test_dir_lists_what_is_imported_when_asked_for(transformers):
    """And imports none of it; without transformers, nothing that getattr would refuse."""
    if transformers:
        pytest.importorskip("transformers")
    hide = "" if transformers else "sys.modules['transformers'] = None; "
    code = (
        f"import inspect, sys; {hide}import gdn_ops; names = dir(gdn_ops); "
        "assert not {'gdn_ops.nn', 'gdn_ops.hf'} & set(sys.modules); "
        "assert len(inspect.getmembers(gdn_ops)) == len(names); print(*names)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = set(run.stdout.split())
    assert {*gdn_ops.__all__, *gdn_ops._MODULES, "__version__"} - {"hf"} <= names
    assert ({"hf", *gdn_ops._FROM_HF} <= names) == transformers
    if not transformers:
        assert not {"hf", *gdn_ops._FROM_HF} & names


def test_no_python_in_the_abi():
    """One library serves every Python version: nothing in it may need Python's C API."""
    data = LIBRARY.read_bytes()
    assert not re.search(rb"\x00_?Py(Object|Err|GIL|Arg|Module|Type|Capsule|Import)_\w+\x00", data)


def test_one_openmp_runtime():
    torch.ones(1000, 1000).sum()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc/self/maps on this system")
    found = {Path(x.split()[-1]).resolve() for x in maps.read_text().splitlines() if "/" in x}
    runtimes = {p for p in found if re.match(r"lib(gomp|iomp5|omp)[.-]", p.name)}
    assert len(runtimes) == 1, runtimes


def thread_times() -> dict[str, int]:
    """Processor ticks of each thread of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        found[task.name] = int(fields[11]) + int(fields[12])
    return found


def test_a_parallel_region_uses_more_than_one_thread():
    """Without -fopenmp at::parallel_for runs serially and says so nowhere."""
    if not Path("/proc/self/task").exists():
        pytest.skip("no /proc/self/task on this system")
    if torch.get_num_threads() < 2:
        pytest.skip("torch has one thread here")
    state = torch.zeros(16, 16, 128, 128)
    q, g = torch.ones(16, 1, 16, 128), torch.zeros(16, 1, 16)
    gdn_ops.recurrent(q, q, q, g, g, state)
    before, worked, start = thread_times(), [], time.monotonic()
    # The system counts by samples of 10 ms, so how many calls show depends on the machine.
    while len(worked) < 2 and time.monotonic() - start < 10:
        for _ in range(200):
            gdn_ops.recurrent(q, q, q, g, g, state)
        worked = [t for t, ticks in thread_times().items() if ticks - before.get(t, 0) >= 5]
    assert len(worked) >= 2, f"only threads {worked} worked"


def test_forced_isa_fails_loudly():
    for name, message in (("sse9", "expected one of"), ("", None)):
        done = subprocess.run(
            [sys.executable, "-c", "import gdn_ops, torch; print(torch.ops.gdn.cpu_isa())"],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "GDN_CPU_ISA": name, "PYTHONPATH": str(PACKAGE.parent)},
        )  # fmt: skip
        if message:
            assert done.returncode != 0 and message in done.stderr and name in done.stderr
        else:
            assert done.returncode == 0, done.stderr


def test_unknown_backend_is_an_error():
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "GDN_BACKEND": "abacus"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "expected none, cuda, xpu or xpu-twin, got 'abacus'" in done.stderr


def test_the_look_at_registers_names_a_missing_compiler(tmp_path):
    run = subprocess.run(
        [sys.executable, "scripts/check_cuda_spills.py"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (1, "nvcc: expected on PATH, not found\n")


def test_source_archive_is_complete(tmp_path):
    """Every tracked file that a build or a test needs is in it, and nothing that was built."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of files to compare with")
    copy = tmp_path / "tree"
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"], cwd=copy, check=True, timeout=120,
        capture_output=True,
    )  # fmt: skip
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {n.split("/", 1)[1] for n in tar.getnames() if "/" in n}
    needed = {n for n in tracked if not n.startswith(".git")}
    assert not needed - names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc")) or "_build_info" in n]
