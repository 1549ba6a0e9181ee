"""The RESULT document as docs/result.md promises it, checked field by field."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

FIELDS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "text": str,
    "is_final": bool,
    "finish_reason": (str, type(None)),
    "audio_s": float,
    "decoded_s": float,
    "num_frames": int,
    "step_ms": float,
}
LISTS = {"tokens", "words", "nbest", "segments"}
#: How many entries were told before and are left out, and the list that they are missing from.
COUNTS = {
    "num_tokens_before": "tokens",
    "num_words_before": "words",
    "num_segments_before": "segments",
}
OPTIONAL = LISTS | COUNTS.keys() | {"rescored"}
ENTRIES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "tokens": {"id": int, "token": str, "start_s": float, "end_s": float, "confidence": float},
    "words": {"word": str, "start_s": float, "end_s": float, "confidence": float},
    "nbest": {"text": str, "score": float, "tokens": list},
    "segments": {
        "text": str,
        "start_s": float,
        "end_s": float,
        "confidence": float,
        "is_final": bool,
        "reason": (str, type(None)),
    },
}


def check_document(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises AssertionError for any field that the documentation does not promise."""
    assert document is not None
    parsed: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    assert set(FIELDS) <= set(parsed) <= set(FIELDS) | OPTIONAL
    _check_types(parsed, FIELDS)
    assert parsed["version"] == 2
    assert parsed["is_final"] == (parsed["finish_reason"] is not None)
    assert parsed["finish_reason"] in (None, "end", "length")
    assert 0.0 <= parsed["decoded_s"] <= parsed["audio_s"]
    assert isinstance(parsed.get("rescored", False), bool)
    assert parsed["is_final"] or not parsed.get("rescored")
    for name in LISTS & set(parsed):
        for entry in parsed[name]:
            assert set(entry) - {"joins_previous"} == set(ENTRIES[name])
            assert entry.get("joins_previous", True) is True
            assert name == "segments" or "joins_previous" not in entry
            _check_types(entry, ENTRIES[name])
    for name in {"tokens", "words", "segments"} & set(parsed):
        _check_spans(parsed[name], parsed["audio_s"])
    _check_counts(parsed)
    _check_agreement(parsed)
    return parsed


def _check_types(entry: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in kinds.items():
        assert isinstance(entry[name], kind), f"{name}={entry[name]!r}"


def _check_counts(document: Mapping[str, Any]) -> None:
    """Where a list may be short there is a count, and in the last document nothing is missing."""
    for count, name in COUNTS.items():
        needs_it = name in document or (name == "tokens" and "nbest" in document)
        assert (count in document) == needs_it
        number = document.get(count, 0)
        assert isinstance(number, int)
        assert number == 0 if document["is_final"] else number >= 0


def _check_spans(entries: list[dict[str, Any]], audio_s: float) -> None:
    """Checks that the entries are in order, inside the audio, and have a confidence."""
    for entry in entries:
        assert 0.0 <= entry["start_s"] < entry["end_s"] <= audio_s + 1e-3
        assert 0.0 <= entry["confidence"] <= 1.0
    for entry, later in itertools.pairwise(entries):
        assert entry["start_s"] <= later["start_s"]
        assert entry["end_s"] <= later["start_s"] + 1e-9


def _check_agreement(document: Mapping[str, Any]) -> None:
    if "words" in document:
        words = [word["word"] for word in document["words"]]
        _check_words(words, document["text"], are_all=document["num_words_before"] == 0)
    if "nbest" in document:
        best = document["nbest"][0]["text"]
        assert document["text"].endswith(best)
        assert document["num_tokens_before"] or document["text"] == best
    if document["is_final"] and "segments" in document:
        assert joined_segments(document["segments"]) == document["text"]
        assert all(segment["is_final"] for segment in document["segments"])
    scores = [entry["score"] for entry in document.get("nbest", [])]
    assert scores == sorted(scores, reverse=True)


def joined_segments(segments: list[dict[str, Any]]) -> str:
    """The text that the segments spell by the rule of docs/result.md."""
    text = ""
    for segment in segments:
        if segment["text"]:
            is_parted = bool(text) and not segment.get("joins_previous")
            text += " " * is_parted + segment["text"]
    return text


def _check_words(words: list[str], text: str, *, are_all: bool) -> None:
    """Nothing but spaces stands between the last words, which have none inside."""
    end = len(text)
    for word in reversed(words):
        assert word
        assert " " not in word
        assert text.endswith(word, 0, end), f"{word!r} does not end {text[:end]!r}"
        end -= len(word)
        end = len(text[:end].rstrip(" "))
    assert end == 0 or not are_all
