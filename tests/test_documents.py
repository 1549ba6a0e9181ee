"""Documents lead where they say: links, the tree of the README, the index of the log."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LOG = (ROOT / "docs" / "LOG.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "oasr_backend"
DOCUMENTS = [
    "README.md",
    "client/README.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_leads_to_one(name: str) -> None:
    path = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    targets = [link for link in links if "://" not in link]
    assert [link for link in targets if not (path.parent / link).exists()] == []


def test_the_tree_of_the_readme_shows_every_room() -> None:
    tree = README.partition("\noasr_backend/ ")[2].partition("\n```")[0]
    shown = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    assert sorted(shown) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    (ground,) = re.findall(r"^  (errors .+?)   ", tree, re.MULTILINE)
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert set(ground.split()) == modules


def test_the_index_of_the_log_names_every_entry_in_ten_lines() -> None:
    index, _, entries = LOG.partition("\n## 20")
    rows = re.findall(r"^\| (?!decision|-)", index, re.MULTILINE)
    links = dict(re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", index))
    headings = re.findall(r"^### (.+)$", entries, re.MULTILINE)
    assert links == {heading: _anchor(heading) for heading in headings}
    assert len(rows) == 10
