"""Documents, comments and docstrings name their subjects: a few words show that one is missing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

UNCLEAR = re.compile(r"\b(whoever|nobody|anybody|meanwhile|all\s+the\s+same|as\s+by)\b", re.I)
CODE = ("oasr_backend", "client", "benchmarks", "examples", "tests", "model_repository")
#: Entries of the log stay as they were written. Those behind this one are held to the rule.
LAST_OLD_ENTRY = "### Ten minutes of chaos, with its first books published\n"


def _path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _python_files() -> list[str]:
    paths = [_path(path) for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    # This file has to name the words.
    return sorted(path for path in paths if path != _path(Path(__file__)))


def _documents() -> list[str]:
    folders = ("docs", *CODE)
    paths = [
        *ROOT.glob("*.md"),
        *(path for name in folders for path in (ROOT / name).rglob("*.md")),
    ]
    settings = (ROOT / "model_repository").rglob("*.pbtxt")
    return sorted(map(_path, (*paths, *settings, ROOT / "Makefile", ROOT / "pyproject.toml")))


def _comments(source: str) -> Iterator[str]:
    """The comments of a file; lines that follow one another are one text."""
    text, last_line = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if line != last_line + 1:
            yield text
            text = ""
        text, last_line = f"{text} {token.string.lstrip('#: ')}", line
    yield text


def _docstrings(source: str) -> Iterator[str]:
    """Every text that stands by itself: those of functions, and those under a field of a class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def _unclear(*texts: str) -> list[str]:
    """Each unclear word with a few that stand around it."""
    found = ((text, match) for text in texts for match in UNCLEAR.finditer(text))
    return [text[max(match.start() - 50, 0) : match.end() + 50] for text, match in found]


def _prose(path: str) -> str:
    """The document without what is kept as it was written."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path == "docs/LOG.md":
        entries = text.index("\n## 20")
        newer = text.partition(LAST_OLD_ENTRY)[2].partition("\n#")
        assert newer[0], "the log has lost an entry"
        return text[:entries] + "".join(newer[1:])
    if path == "CHANGELOG.md":
        head, released, _older = text.partition("\n## [0")
        return head if released else text
    return text


@pytest.mark.parametrize("path", _python_files())
def test_comments_and_docstrings_name_their_subjects(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert not _unclear(*_comments(source), *_docstrings(source))


@pytest.mark.parametrize("path", _documents())
def test_documents_name_their_subjects(path: str) -> None:
    assert not _unclear(_prose(path))


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # Whoever asks.\n",
        "# What is served all\n# the same.\nx = 1\n",
        'def f():\n    """Nobody\n    waits."""\n',
        'class C:\n    x: int = 1\n    """Cores as\n    by the flag."""\n',
    ],
)
def test_the_words_are_found_where_they_stand(source: str) -> None:
    assert _unclear(*_comments(source), *_docstrings(source))


def test_strings_and_names_are_not_prose() -> None:
    source = 'def keep_nobody_out():\n    return "nobody"\n'
    assert not _unclear(*_comments(source), *_docstrings(source))
