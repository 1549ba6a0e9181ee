"""How parts of a text are joined."""

from __future__ import annotations


def join_texts(earlier: str, later: str) -> str:
    return " ".join(part for part in (earlier, later) if part)
