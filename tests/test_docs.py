"""Pages: links lead somewhere, every op has one, each can be found, figures have a date, and their
Python runs as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_arguments import OPS

import gdn_ops

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = {".cpp", ".cu", ".cuh", ".h", ".py", ".sh", ".xpu"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What headings are called in links: words in lower case, joined by hyphens."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-"))
    return found


def targets(page: Path) -> list[tuple[str, Path, str]]:
    """(link, file, anchor) of the links into this tree."""
    found = []
    for link in LINK.findall(page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            found.append((link, (page.parent / path).resolve() if path else page, anchor))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link, target, anchor in targets(page):
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading"


def test_every_page_is_reached_from_the_readme():
    reached, to_read = set(), [ROOT / "README.md"]
    while to_read:
        for _, target, _ in targets(to_read.pop()):
            if target.suffix == ".md" and target.exists() and target not in reached:
                reached.add(target)
                to_read.append(target)
    assert {p for p in PAGES if "docs" in p.parts} <= reached


def test_index_says_what_every_page_answers():
    index = ROOT / "docs" / "README.md"
    rows = [line for line in index.read_text().splitlines() if re.match(r"\| .+ \| .+ \|$", line)]
    named = {(index.parent / link).resolve() for row in rows for link in LINK.findall(row)}
    assert {p for p in PAGES if "docs" in p.parts and p != index} <= named


def test_pages_named_in_sources_exist():
    folders = ("csrc", "gdn_ops", "tests", "scripts", "benchmarks", "examples")
    sources = [p for f in folders for p in (ROOT / f).rglob("*.*") if p.suffix in SOURCES]
    named = {
        (path, page)
        for path in [*sources, *ROOT.glob("*.py"), ROOT / "Makefile"]
        for page in re.findall(r"docs/[\w/]+\.md", path.read_text())
    }
    assert named and not [(str(p), page) for p, page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_on_pages_exist(page):
    """But for patterns of names, like csrc/BACKEND/ops.cpp."""
    folders = "gdn_ops|csrc|tests|scripts|benchmarks|examples|docs"
    named = set(re.findall(rf"`((?:{folders})/[\w./*-]+)[`:]", page.read_text()))
    assert not [n for n in named if not re.search("[A-Z]{3}", n) and not list(ROOT.glob(n))]


def test_commands_on_pages_are_understood(tmp_path, monkeypatch):
    pytest.importorskip("rich")
    from gdn_ops.cli import build_parser

    monkeypatch.chdir(tmp_path)
    stands_for = {"FAMILY": "recurrent", "DIR": ".", "FILE": __file__}
    parser, commands = build_parser(), set()
    for page in PAGES:
        found = re.findall(r"`gdn-ops ([^`]*)`|^gdn-ops ([^#\[\n]*)", page.read_text(), re.M)
        commands |= {(a or b).strip() for a, b in found}
    assert len(commands) >= 20
    for command in commands:
        parser.parse_args([stands_for.get(w, w) for w in command.split()])  # or the test ends


def test_every_op_has_a_page():
    index = ROOT / "docs" / "ops" / "README.md"
    pages = {}
    for link, ops in re.findall(r"^\| \[\w+\]\((\S+)\) \| (.*) \|$", index.read_text(), re.M):
        text = (index.parent / link).read_text()
        for op in re.findall(r"`(\w+)`", ops):
            assert re.search(rf"`{op}`|\b{op}\(", text), f"{link} does not speak of {op}"
            pages[op] = link
    assert set(pages) >= set(OPS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_with_figures_have_a_date(page):
    text = page.read_text()
    if re.search(r"\d (ms|us|microseconds|GB/s|tok/s|tokens/s)\b", text):
        assert re.search(r"20\d\d-\d\d-\d\d", text), f"{page.name}: times without a date"


def run(page: str, block: int = 0, **names) -> dict:
    """The names that a block of Python on a page leaves, from those that it is given."""
    text = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)[block]
    exec(compile(text, page, "exec"), names)
    return names


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_ten_lines_of_the_readme(page):
    found = run(page)
    assert found["o"].shape == (3, 1, 48, 128) and not found["o"][2].any()
    assert found["pool"][[3, 17]].any() and not found["pool"][[0, -1]].any()


def test_what_the_readme_says_is_computed():
    K, V = 5, 3
    q, k, v = torch.randn(K), torch.randn(K), torch.randn(V)
    g, beta, state = -torch.rand(()), torch.rand(()), torch.randn(1, 1, V, K)
    found = run(
        "README.md", 1, torch=torch, S=state[0, 0], q=q, k=k, v=v, g=g, beta=beta, scale=K**-0.5
    )
    q, k, v = (x.view(1, 1, 1, -1) for x in (q, k, v))
    o = gdn_ops.recurrent(q, k, v, g.view(1, 1, 1), beta.view(1, 1, 1), state)
    torch.testing.assert_close(o.flatten(), found["o"])
    torch.testing.assert_close(state[0, 0], found["S"])


def test_equivalent_torch_of_the_recurrence():
    T, H, HV, K, V = 3, 2, 6, 5, 4
    q, k = torch.randn(2, 1, T, H, K)
    v, g, beta = torch.randn(1, T, HV, V), -torch.rand(1, T, HV), torch.rand(1, T, HV)
    state, o = torch.randn(4, HV, V, K), torch.empty(1, T, HV, V)
    pool, rows = state.clone(), torch.tensor([2])
    want = gdn_ops.recurrent(q, k, v, g, beta, pool, rows)
    run(
        "docs/ops/recurrent.md", q=q, k=k, v=v, g=g, beta=beta, state=state, o=o, row=2, b=0, T=T,
        H=H, HV=HV, scale=K**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(state, pool)


def test_hugging_face_page_runs():
    pytest.importorskip("transformers")
    from gdn_ops.hf.tiny import tiny_model

    try:
        run("docs/huggingface.md", model=tiny_model("qwen3_5", head_dim=16))
    finally:
        gdn_ops.unregister_transformers()


def test_distributed_page_runs():
    """With one process, not two, in a process of its own: a group stays with whoever makes it."""
    pytest.importorskip("transformers")
    text = re.findall(r"```python\n(.*?)```", (ROOT / "docs/distributed.md").read_text(), re.S)[0]
    assert text.count("(2,)") == 1
    script = (
        "from gdn_ops.hf.tiny import tiny_model\nmodel = tiny_model('qwen3_5', head_dim=16)\n"
        + text.replace("(2,)", "(1,)")
        + "assert 'gdn_ops (full)' in gdn_ops.active(model).values()\n"
        + "torch.distributed.destroy_process_group()\n"
    )
    path = os.pathsep.join([str(Path(gdn_ops.__file__).parent.parent), *sys.path])
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **group, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_export_page_runs(tmp_path, monkeypatch):
    if not hasattr(torch._inductor, "aoti_compile_and_package"):
        pytest.skip("this torch has no AOTInductor packages")
    monkeypatch.chdir(tmp_path)
    assert run("docs/export.md")["y"].shape == (3, 1, 1024)
