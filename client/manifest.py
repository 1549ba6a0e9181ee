"""Recordings with reference texts, and the word error rate over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oasr_client.errors import ClientError

_AUDIO_KEYS = ("audio", "wav", "audio_filepath", "audio_path", "path", "file")


@dataclass(frozen=True)
class Reference:
    audio: Path
    text: str


@dataclass(frozen=True)
class WordErrors:
    """`num_files` counts references: a file with two of them is scored against each."""

    num_errors: int
    num_words: int
    num_files: int

    @property
    def rate(self) -> float:
        return self.num_errors / self.num_words if self.num_words else float(self.num_errors > 0)


def load_manifest(path: Path) -> list[Reference]:
    """The entries of a JSON list or JSON lines of objects with an audio path and `text`.

    Relative audio paths start at the manifest's folder. Raises ClientError naming the entry.
    """
    try:
        content = path.read_text(encoding="utf-8")
        entries = _entries(content)
    except (OSError, ValueError) as error:
        raise ClientError(
            f"{path}: not a manifest ({error}); write a JSON list or JSON lines"
        ) from error
    return [_reference(path, number, entry) for number, entry in enumerate(entries, 1)]


def word_errors(references: Sequence[Reference], texts: Mapping[Path, str]) -> WordErrors:
    """Over the references whose file has a text, case folded.

    Raises ClientError when jiwer is missing.
    """
    try:
        import jiwer
    except ImportError as error:
        raise ClientError(
            "the word error rate needs the package jiwer; pip install jiwer"
        ) from error
    num_errors = num_words = num_files = 0
    for entry in references:
        if entry.audio not in texts:
            continue
        reference, text = entry.text.casefold(), texts[entry.audio].casefold()
        num_files += 1
        num_words += len(reference.split())
        if not reference.split():
            # jiwer refuses an empty reference: every word heard there is an insertion.
            num_errors += len(text.split())
            continue
        counts = jiwer.process_words(reference, text)
        num_errors += counts.substitutions + counts.deletions + counts.insertions
    return WordErrors(num_errors, num_words, num_files)


def _entries(content: str) -> list[Any]:
    if content.lstrip().startswith("["):
        loaded = json.loads(content)
        return list(loaded)
    return [json.loads(line) for line in content.splitlines() if line.strip()]


def _reference(manifest: Path, number: int, entry: Any) -> Reference:
    fields = entry if isinstance(entry, dict) else {}
    audio = next((fields[key] for key in _AUDIO_KEYS if key in fields), None)
    text = fields.get("text")
    if not isinstance(audio, str) or not isinstance(text, str):
        raise ClientError(
            f"{manifest}: entry {number} needs a text and one of {', '.join(_AUDIO_KEYS)}"
        )
    return Reference(manifest.parent / audio, text)
