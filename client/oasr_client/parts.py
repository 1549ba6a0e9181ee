"""One stream that the server heard in several parts, told as if it had been one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oasr_client.scripts import join_texts

Document = dict[str, Any]

#: The entries of these lists have `start_s` and `end_s`.
_TIMED = ("tokens", "words", "segments")


class Parts:
    """The parts before the current one: their text, their RESULT documents, how long they are."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._text = ""
        self._offset_s = 0.0
        self._num_frames = 0
        self._were_rescored = True
        self._entries: dict[str, list[Document]] = {name: [] for name in _TIMED}
        # Score and tokens of the best hypothesis; None once a part has not told them.
        self._best: tuple[float, list[int]] | None = (0.0, [])

    def __len__(self) -> int:
        return self._num_parts

    def close(self, text: str, document: Document | None) -> None:
        """Takes the last text and document of the part that is now over."""
        document = document or {}
        for name in _TIMED:
            self._entries[name] += self._moved(document.get(name, ()))
        for segment in self._entries["segments"]:
            if not segment["is_final"]:
                segment.update(is_final=True, reason="restart")
        self._best = _followed(self._best, document.get("nbest"))
        self._text = join_texts(self._text, text)
        # The client sends a part again from its beginning if the server decoded none of it.
        received_s: float = document.get("audio_s", 0.0)
        self._offset_s += document.get("decoded_s", received_s)
        self._num_frames += int(document.get("num_frames", 0))
        self._were_rescored &= bool(document.get("rescored"))
        self._num_parts += 1

    def text(self, later: str) -> str:
        return join_texts(self._text, later)

    def document(self, later: Document) -> Document:
        """`later`, the current part's, with everything that was heard before it.

        `nbest` holds the alternatives of the current part, each behind the best of the earlier
        ones; it is left out where an earlier part ended without one.
        """
        if not self._num_parts:
            return later
        merged = {**later, **self._totals(later)}
        for name in _TIMED:
            if name in later:
                merged[name] = [*self._entries[name], *self._moved(later[name])]
        if "nbest" in later:
            merged.pop("nbest")
            if self._best is not None:
                merged["nbest"] = self._alternatives(*self._best, later["nbest"])
        return merged

    def _totals(self, later: Document) -> Document:
        totals: Document = {"text": self.text(str(later.get("text", "")))}
        for name in {"audio_s", "decoded_s"} & set(later):
            totals[name] = _moment(later[name], self._offset_s)
        if "num_frames" in later:
            totals["num_frames"] = self._num_frames + later["num_frames"]
        if "rescored" in later:
            totals["rescored"] = self._were_rescored and later["rescored"]
        return totals

    def _moved(self, entries: Iterable[Mapping[str, Any]]) -> list[Document]:
        return [
            {**entry, **{key: _moment(entry[key], self._offset_s) for key in ("start_s", "end_s")}}
            for entry in entries
        ]

    def _alternatives(
        self, score: float, tokens: list[int], entries: Iterable[Mapping[str, Any]]
    ) -> list[Document]:
        return [
            {
                **entry,
                "text": self.text(entry["text"]),
                "score": score + entry["score"],
                "tokens": [*tokens, *entry["tokens"]],
            }
            for entry in entries
        ]


def _moment(time_s: float, by_s: float) -> float:
    return round(time_s + by_s, 3)


def _followed(
    best: tuple[float, list[int]] | None, entries: list[Document] | None
) -> tuple[float, list[int]] | None:
    if best is None or not entries:
        return None
    return best[0] + entries[0]["score"], [*best[1], *entries[0]["tokens"]]
