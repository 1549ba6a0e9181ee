"""Joins parts of a text, and knows which scripts put no space between words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

#: Han, kana and bopomofo with their own punctuation; Thai, Lao, Burmese and Khmer. The inside of a
#: character class.
UNSPACED = (
    "\u2e80-\u2fdf\u3001-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f"
    "\U00020000-\U0003ffff"
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u19e0-\u19ff"
)
_UNSPACED = re.compile(f"[{UNSPACED}]")
#: Combining marks and closing punctuation, which belong to the word before.
_TRAILING_CATEGORIES = frozenset({"Mn", "Mc", "Me", "Pc", "Pd", "Pe", "Pf", "Po"})
#: Opening punctuation, which belongs to the word behind.
_LEADING_CATEGORIES = frozenset({"Ps", "Pi"})


def is_unspaced(character: str) -> bool:
    """Whether the character is of a script that puts no space between words."""
    return _UNSPACED.match(character) is not None


def join_texts(earlier: str, later: str) -> str:
    """Two parts of one transcript: a space between them, save where their scripts have none."""
    return earlier + separator(earlier, later) + later


def separator(before: str, after: str) -> str:
    """What stands between two parts of a text of which nothing but the characters is known."""
    if not before or not after or _belong_together(before[-1], after[0]):
        return ""
    return " "


def _belong_together(last: str, first: str) -> bool:
    """Characters of unspaced scripts, and their punctuation and its word in whatever script."""
    if is_unspaced(last) and unicodedata.category(last) in _LEADING_CATEGORIES:
        return True
    goes_on = unicodedata.category(first) in _TRAILING_CATEGORIES
    return is_unspaced(first) and (goes_on or is_unspaced(last))


def is_inside_word(before: str, after: str) -> bool:
    """Whether a word goes on over a border without a space. A word may end between Han letters."""
    goes_on = unicodedata.category(after[0]) in _TRAILING_CATEGORIES
    return goes_on or not (is_unspaced(before[-1]) and is_unspaced(after[0]))


def separators(words: Sequence[str], text: str) -> list[str]:
    """What stands before each word in `text`; by script where `text` is not made of the words."""
    found: list[str] = []
    at = 0
    for word in words:
        space = " " if text.startswith(" ", at) else ""
        if not text.startswith(space + word, at):
            return [separator(a, b) for a, b in zip(["", *words], words, strict=False)]
        found.append(space)
        at += len(space + word)
    return found
