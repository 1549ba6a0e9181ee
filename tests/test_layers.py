"""The order of imports, read from the source: a module imports only from lower lines."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oasr_backend
from tests.conftest import ROOT
from tests.guards import GUARD_S

PACKAGE = ROOT / "oasr_backend"
CLIENT = ROOT / "client" / "oasr_client"

#: From the bottom up. A group imports only from lines above its own, or from itself.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "device", "cores", "folders"),
    ("options",),
    ("types", "config"),
    ("metrics", "kernels"),
    ("features", "text"),
    ("decoders",),
    ("cache",),
    ("models",),
    ("compiled",),
    ("checkpoints",),
    ("streaming",),
    ("parity", "triton_backend"),
    ("serve",),
)
MOST_LINES_OF_A_CLASS = 200
LEVEL_OF = {group: level for level, groups in enumerate(LEVELS) for group in groups}
MODULES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted({path.parent for path in MODULES if "__all__" in path.read_text("utf-8")})


def imports(path: Path) -> Iterator[str]:
    """Every module name that the file imports, also inside functions; relative ones as ".x"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def group_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path != PACKAGE / "__init__.py"], ids=relative
)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    group = group_of(path)
    assert group in LEVEL_OF, f"{relative(path)} has no place in LEVELS"
    for name in imports(path):
        assert not name.startswith("."), f"import {name} absolutely"
        top, _, rest = name.partition(".")
        if top != "oasr_backend" or not rest:
            continue
        used = rest.partition(".")[0]
        assert used == group or LEVEL_OF[used] < LEVEL_OF[group], f"{group} imports {used}"


@pytest.mark.parametrize("path", [*MODULES, *sorted(CLIENT.rglob("*.py"))], ids=relative)
def test_nothing_that_ships_imports_tests_or_benchmarks(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path)} & {"tests", "benchmarks"}


def test_triton_is_seen_by_one_module_only() -> None:
    users = {relative(path) for path in MODULES if "triton_python_backend_utils" in imports(path)}
    assert users == {"oasr_backend/triton_backend/io.py"}


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=relative)
def test_the_client_stands_alone(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imports(path)} & {"oasr_backend", "torch"}


@pytest.mark.parametrize("name", ["errors", "types", "config", "metrics", "options"])
def test_plain_modules_know_nothing_of_pytorch(name: str) -> None:
    assert "torch" not in {used.partition(".")[0] for used in imports(PACKAGE / f"{name}.py")}


def test_the_root_of_the_package_holds_the_ground_alone() -> None:
    ground = {"__init__", "errors", "types", "config", "options", "metrics", "device"}
    ground |= {"cores", "folders"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == ground


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_class_is_too_long_to_read_at_once(path: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ClassDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in nodes}
    too_long = {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_CLASS}
    assert not too_long


def test_the_launcher_starts_without_pytorch() -> None:
    script = "import sys, oasr_backend.serve.app; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=GUARD_S, cwd=ROOT)


def kind_then_name(name: str) -> tuple[int, str]:
    """Constants, classes, functions: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("package", [*PACKAGES, CLIENT], ids=relative)
def test_all_is_sorted_and_every_name_of_it_exists(package: Path) -> None:
    name = "oasr_client" if package == CLIENT else relative(package).replace("/", ".")
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        return
    assert list(listed) == sorted(listed, key=kind_then_name)
    assert len(set(listed)) == len(listed)
    for entry in listed:
        assert getattr(module, entry) is not None


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_all_is_complete(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    public = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oasr_backend")
        for alias in node.names
    }
    module = importlib.import_module(relative(package).replace("/", "."))
    assert public == set(module.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginge'"):
        _ = oasr_backend.Enginge
