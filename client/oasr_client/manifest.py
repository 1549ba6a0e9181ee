"""Recordings with reference texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasr_client.errors import ClientError
from oasr_client.sources import AudioSource, Excerpt
from oasr_client.words import WordErrors as WordErrors
from oasr_client.words import word_errors as word_errors

_AUDIO_KEYS = ("audio", "wav", "audio_filepath", "audio_path", "path", "file")


@dataclass(frozen=True)
class Reference:
    audio: AudioSource
    text: str


def load_manifest(path: Path) -> list[Reference]:
    """The entries of a JSON list or JSON lines of objects with an audio path and `text`.

    `offset` and `duration`, in seconds, cut an excerpt out. Relative audio paths start at the
    manifest's folder. Raises ClientError naming the entry.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
        entries = _entries(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ClientError(
            f"{path}: not a manifest ({error}); write a JSON list or JSON lines"
        ) from error
    if not entries:
        raise ClientError(f"manifest {path} holds no entries; name the audio that is to be scored")
    return [_reference(path, number, entry) for number, entry in enumerate(entries, 1)]


def _entries(content: str) -> list[Any]:
    if content.lstrip().startswith("["):
        loaded = json.loads(content)
        return list(loaded)
    # Only line feeds end a line here: JSON strings may hold the other characters that do.
    lines = enumerate(content.split("\n"), 1)
    return [_line(number, line) for number, line in lines if line.strip()]


def _line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        # The decoder counts lines from the one that it was given.
        raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def _reference(manifest: Path, number: int, entry: Any) -> Reference:
    fields = entry if isinstance(entry, dict) else {}
    audio = next((fields[key] for key in _AUDIO_KEYS if key in fields), None)
    text = fields.get("text")
    if not isinstance(audio, str) or not isinstance(text, str):
        raise ClientError(
            f"{manifest}: entry {number} needs a text and one of {', '.join(_AUDIO_KEYS)}"
        )
    where = f"{manifest}: entry {number}"
    offset_s = _seconds(fields, "offset", where=where) or 0.0
    duration_s = _seconds(fields, "duration", where=where)
    if duration_s == 0.0:
        raise ClientError(f"{where}: its duration is 0 s; give a longer one, or leave it out")
    path = manifest.parent / audio
    if offset_s == 0.0 and duration_s is None:
        return Reference(path, text)
    return Reference(Excerpt(path, offset_s, duration_s), text)


def _seconds(fields: Mapping[str, Any], name: str, *, where: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # JSON's integers may be larger than any float.
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ClientError(f"{where}: its {name} is {value!r}; give seconds, 0 or more")
    return float(value)
