"""Completes RESULT documents: one of a live stream leaves out what an earlier one told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Each list, with the field that counts the first entries that the document leaves out.
_COUNTS = {
    "tokens": "num_tokens_before",
    "words": "num_words_before",
    "segments": "num_segments_before",
}


def whole(document: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with what it leaves out, taken from `earlier`, the whole one before it.

    `earlier` is empty for the first document of a stream. Servers that leave nothing out do not
    count anything either.
    """
    found = {**document, **{count: 0 for count in _COUNTS.values() if count in document}}
    for name, count in _COUNTS.items():
        if name in document:
            kept = earlier.get(name, [])[: document.get(count, 0)]
            found[name] = [*kept, *document[name]]
    if document.get("nbest") and document.get("num_tokens_before"):
        found["nbest"] = _whole_nbest(document, earlier)
    return found


def _whole_nbest(document: Mapping[str, Any], earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All hypotheses share the tokens that are left out, and their text."""
    nbest: list[dict[str, Any]] = document["nbest"]
    kept = earlier["nbest"][0]["tokens"][: document["num_tokens_before"]]
    text = document["text"].removesuffix(nbest[0]["text"])
    return [
        {**entry, "text": text + entry["text"], "tokens": [*kept, *entry["tokens"]]}
        for entry in nbest
    ]
