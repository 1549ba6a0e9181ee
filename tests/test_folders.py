"""Where caches lie: the user's folder, else a temporary one that only the user can fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasr_backend import folders


@pytest.fixture(autouse=True)
def _no_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    folders._temporary_root.cache_clear()


def test_processes_of_a_user_share_the_temporary_folder(tmp_path: Path) -> None:
    root = folders.cache_root()
    assert root.parent == tmp_path / "tmp"
    assert root.stat().st_mode & 0o777 == 0o700
    folders._temporary_root.cache_clear()
    assert folders.cache_root() == root


@pytest.mark.parametrize("way", ["writable for all", "a link", "a file"])
def test_a_temporary_folder_that_others_could_have_filled_is_not_used(
    way: str, tmp_path: Path
) -> None:
    shared = folders.cache_root()
    if way == "writable for all":
        shared.chmod(0o777)
    else:
        shared.rmdir()
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        if way == "a link":
            shared.symlink_to(tmp_path / "elsewhere")
        else:
            shared.write_text("no folder")
    folders._temporary_root.cache_clear()
    other = folders.cache_root()
    assert other.is_dir()
    assert other.resolve() not in (shared.resolve(), tmp_path / "elsewhere")
    assert folders.cache_root() == other, "one for the whole process"


def test_a_relative_folder_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folders.cache_root() == tmp_path / "home" / ".cache" / "oasr_backend"
