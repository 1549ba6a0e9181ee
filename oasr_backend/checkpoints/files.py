"""The files of a checkpoint: that they are there, and are what their names say."""

from __future__ import annotations

import os
import re
from pathlib import Path

from oasr_backend.errors import CheckpointError

#: How files begin that stand where another was meant, with what they are and how to get the other.
_IMPOSTORS = (
    (
        b"version https://git-lfs.github.com/spec",
        "a Git LFS pointer, not the file that it stands for; run `git lfs pull` where it came from "
        "and copy it again",
    ),
    (b"<!doctype html", "a web page; download the file itself"),
    (b"<html", "a web page; download the file itself"),
    (b"7767517", "an ncnn graph, exported without what its training knew; give the PyTorch file"),
    (b"\x1f\x8b", "a gzip archive; unpack it and give the file inside"),
)
#: A message of protocol buffers that begins with ONNX's version and the name of its producer.
_ONNX = re.compile(rb"\x08.\x12.[\w.-]{3,}", re.DOTALL)
#: What is made of a checkpoint for another runtime, by how the names of its files end.
_EXPORTS = {
    ".onnx": "an ONNX graph",
    ".ort": "an ONNX graph",
    ".ncnn.param": "an ncnn graph",
    "jit.pt": "a TorchScript archive",
    "jit_script.pt": "a TorchScript archive",
}
_LONGEST_SIGN = max(len(sign) for sign, _ in _IMPOSTORS)


def existing(path: Path, *, layout: str) -> Path:
    """The path of a file that is needed; `layout` says in a clause what a whole checkpoint holds.

    Raises CheckpointError for one that is missing or stands for another.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} {what_stands_at(path)}; {layout}. Copy it there, or point checkpoint_dir "
            "elsewhere"
        )
    check_kind(path)
    return path


def is_named(path: Path) -> bool:
    """Whether something stands there, be it a link to what is not there."""
    return os.path.lexists(path)


def what_stands_at(path: Path) -> str:
    """What the path is that is no file, in a clause."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which is not there"
    return "is a folder" if path.is_dir() else "does not exist"


def check_kind(path: Path) -> None:
    """Raises CheckpointError for a file that cannot be read or whose first bytes give it away."""
    try:
        with path.open("rb") as file:
            start = file.read(_LONGEST_SIGN).lower()
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error}); check its permissions") from error
    for sign, what in _IMPOSTORS:
        if start.startswith(sign):
            raise CheckpointError(f"{path} is {what}")
    if _ONNX.match(start):
        raise CheckpointError(f"{path} is an ONNX graph; give the PyTorch file it was made from")


def export_in(path: Path) -> str:
    """The first export for another runtime that a folder holds, or that the file is, in a clause.

    Empty for none. Looks at names alone.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path] * path.exists()
    for file in files:
        for end, what in _EXPORTS.items():
            if file.name.endswith(end):
                return f"{file.name} is {what}; give the PyTorch file it was made from"
    return ""
