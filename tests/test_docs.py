"""Pages: links lead somewhere, every op has one, each can be found, figures have a date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_arguments import OPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
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
