"""A model repository whose models have other numbers of instances than their config.pbtxt says.

Triton takes that number from config.pbtxt alone. So it is given a folder of links to the files of
the real repository, in which only those config.pbtxt are files. The folder stays: another start
uses it again, and one that became tritonserver could not remove it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from oasr_backend.errors import ServerError
from oasr_backend.folders import cache_root
from oasr_backend.serve.embedded import put_in_place
from oasr_backend.serve.pbtxt import with_instances

CONFIG_NAME = "config.pbtxt"


def prepare_repository(
    repository: Path, instances: Mapping[str, int], root: Path | None = None
) -> Path:
    """The folder for `--model-repository`: the repository itself where no number differs.

    instances: the number by model, of those that differ; root: of the caches, None: the user's.

    The folder's name is a digest of what it holds, so servers that start at the same time share
    it. Raises ServerError when it cannot be written.
    """
    repository = repository.resolve()
    if not instances:
        return repository
    entries = dict(_entries(repository, instances))
    target = _place_of(entries, root)
    try:
        if not _is_complete(target, entries):
            _build(target, entries)
    except OSError as error:
        raise ServerError(
            f"cannot write the folder {target}, which serves {repository} with other numbers of "
            f"instances: {error.strerror}; free or allow that path, or write count of "
            f"instance_group in {CONFIG_NAME}"
        ) from error
    return target


def with_own_paths(text: str, repository: Path, instances: Mapping[str, int]) -> str:
    """What a server says, with the files of the user's repository instead of those it was given."""
    repository = repository.resolve()
    if not instances or not repository.is_dir():
        return text
    served = _place_of(dict(_entries(repository, instances)), None)
    return text.replace(str(served), str(repository))


def _place_of(entries: Mapping[str, str | Path], root: Path | None) -> Path:
    return (root or cache_root()) / "repositories" / _digest(entries)


def _entries(repository: Path, instances: Mapping[str, int]) -> Iterator[tuple[str, str | Path]]:
    """Each entry by its place in the folder: the text of a file, or where a link leads."""
    for path in sorted(repository.iterdir()):
        if path.name not in instances:
            yield path.name, path
            continue
        for part in sorted(path.iterdir()):
            place = f"{path.name}/{part.name}"
            if part.name == CONFIG_NAME:
                text = part.read_text(encoding="utf-8")
                yield place, with_instances(text, instances[path.name])
            else:
                yield place, part


def _digest(entries: Mapping[str, str | Path]) -> str:
    digest = hashlib.sha256()
    for place, what in sorted(entries.items()):
        for part in (place, type(what).__name__, str(what)):
            digest.update(hashlib.sha256(os.fsencode(part)).digest())
    return digest.hexdigest()[:16]


def _is_complete(target: Path, entries: Mapping[str, str | Path]) -> bool:
    return all(_holds(target / place, what) for place, what in entries.items())


def _holds(path: Path, what: str | Path) -> bool:
    if isinstance(what, Path):
        return path.is_symlink() and path.readlink() == what
    return path.is_file() and path.read_text(encoding="utf-8") == what


def _build(target: Path, entries: Mapping[str, str | Path]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        for place, what in entries.items():
            path = staging / place
            path.parent.mkdir(exist_ok=True)
            if isinstance(what, Path):
                path.symlink_to(what)
            else:
                path.write_text(what, encoding="utf-8")
        put_in_place(staging, target, lambda: _is_complete(target, entries))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
