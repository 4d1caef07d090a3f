"""Which file may include or import which: the layers that the README promises."""

import ast
import re
from pathlib import Path

import pytest

from gdn_ops import _limits

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
TORCH = re.compile(r"^(torch|ATen|c10|pybind11)/|^Python\.h$")
KERNELS = sorted(p for p in (ROOT / "csrc").glob("*/kernels/*") if p.suffix != ".md")
# Files that may see torch: schemas, checks, autograd and what it composes of ATen calls, the glue
# of each backend (in csrc/xpu also chunk.cpp, whose matrix products are torch's), and the device
# hooks of a backend that torch does not know.
TORCH_FACING = re.compile(
    r"csrc/(ops|call_forms|check_parts|check_values|checks|in_place|autograd|chunk_aten|linear_aten"
    r"|paged|typed_op)\.(cpp|h)$"
    r"|csrc/\w+/(ops|torch_device)\.cpp$"
    r"|csrc/xpu/(chunk\.cpp|glue\.h)$"
)


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


def native_files() -> list[Path]:
    found = []
    for suffix in ("h", "cpp", "cu", "cuh", "xpu"):
        found += (ROOT / "csrc").rglob(f"*.{suffix}")
    return sorted(found)


def ids(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def test_there_are_kernels_to_look_at():
    assert len(KERNELS) >= 5, KERNELS


@pytest.mark.parametrize("path", native_files(), ids=ids(native_files()))
def test_only_the_glue_includes_torch(path):
    name = str(path.relative_to(ROOT))
    torch_includes = [i for i in includes(path) if TORCH.match(i)]
    if not TORCH_FACING.search(name):
        assert not torch_includes, f"{name} includes {torch_includes}"


@pytest.mark.parametrize("path", native_files(), ids=ids(native_files()))
def test_nothing_includes_python(path):
    assert not [i for i in includes(path) if i in ("Python.h", "torch/extension.h", "torch/all.h")]


@pytest.mark.parametrize("path", KERNELS, ids=ids(KERNELS))
def test_kernels_include_nothing_above_them(path):
    """A kernel may see its own directory, and plain data of the project; never glue or checks."""
    for name in includes(path):
        assert not name.endswith(("checks.h", "check_parts.h", "ops.cpp")), (
            f"{path.name} includes {name}"
        )
        target = (path.parent / name).resolve()
        if target.exists():
            assert target.is_relative_to(ROOT / "csrc")
            seen = [i for i in includes(target) if TORCH.match(i)]
            assert not seen, f"{path.name} reaches torch through {name}"


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "csrc" / "cpu" / "kernels").glob("*.h")),
    ids=lambda p: p.name,
)
def test_cpu_kernels_include_only_the_prelude(path):
    """They are compiled under raised targets: a std inline function compiled there may be the copy
    that the linker keeps, and then crash an older processor."""
    allowed = {"prelude.h", "all.h"}
    if path.name in allowed:
        return
    assert not includes(path), f"{path.name} includes {includes(path)}"


def test_backends_do_not_include_each_other():
    backends = [p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()]
    for path in native_files():
        own = path.relative_to(ROOT / "csrc").parts[0]
        for name in includes(path):
            if TORCH.match(name):  # c10/cuda/... is torch's, and Kunlun's torch has it too
                continue
            others = [b for b in backends if b != own and f"/{b}/" in f"/{name}"]
            if own in backends:
                assert not others, f"{path} includes {name}"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


# The part of the package, and what it must not import.
UPWARD = {
    "gdn_ops/reference.py": ("gdn_ops.",),
    "gdn_ops/ops": ("gdn_ops.nn", "gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench", "transformers"),
    "gdn_ops/_limits.py": ("gdn_ops.",),
    "gdn_ops/_compile.py": ("gdn_ops.",),
    "gdn_ops/_support.py": ("gdn_ops.nn", "gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench"),
    "gdn_ops/_modules.py": ("gdn_ops.nn", "gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench"),
    "gdn_ops/nn.py": ("gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench", "transformers"),
    "gdn_ops/compat": ("gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench", "transformers"),
    "gdn_ops/distributed.py": ("gdn_ops.hf", "gdn_ops.cli", "gdn_ops.bench", "transformers"),
    "gdn_ops/hf": ("gdn_ops.cli", "gdn_ops.bench"),
    "gdn_ops/bench": ("gdn_ops.cli",),
}


@pytest.mark.parametrize("part", UPWARD)
def test_nothing_imports_upward(part):
    where = ROOT / part
    files = [where] if where.suffix else sorted(where.rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            for banned in UPWARD[part]:
                assert not (name == banned or name.startswith(banned.rstrip(".") + ".")), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_private_names_stay_in_their_module():
    """A private module is the package's own; a private function or constant is one file's."""
    for path in sorted((ROOT / "gdn_ops").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) or ""
            if not module.startswith("gdn_ops"):
                continue
            for name in (a.name for a in node.names if a.name.startswith("_")):
                assert (ROOT / module.replace(".", "/") / f"{name}.py").exists(), (
                    f"{path.relative_to(ROOT)} imports {name} of {module}"
                )


def test_the_limits_in_python_are_those_of_the_kernels():
    said = (ROOT / "csrc/args.h").read_text()
    for ours in ("MAX_HEAD_DIM", "MAX_WINDOW", "MAX_CONV_WIDTH", "MIN_CHUNK", "MAX_CHUNK",
                 "DECODE_TOKENS"):  # fmt: skip
        theirs = "k" + ours.title().replace("_", "")
        found = re.findall(rf"\b{theirs} = (\d+)", said)
        assert found == [str(getattr(_limits, ours))], theirs


def test_ops_are_called_through_schemas_only():
    """No Python custom op: it costs 7 to 10 microseconds a call and hides the op from C++."""
    for path in (ROOT / "gdn_ops").rglob("*.py"):
        assert "custom_op(" not in path.read_text(), path
