"""What the scripts of the world do at a border: who writes no spaces, and what belongs together.

The text has no space between two characters of Chinese and Japanese. Thai, Lao, Burmese and Khmer
write one between phrases only. In all of them a word may end after any character, save inside a
grapheme cluster, before a closing mark and behind an opening one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection

#: Han, kana and bopomofo with their own punctuation, as the inside of a character class.
CJK = (
    "\u2e80-\u2fdf\u3001-\u303f\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f"
    "\U00020000-\U0003ffff"
)
#: Thai, Lao, Burmese, Khmer.
_SOUTH_EAST_ASIAN = (
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u19e0-\u19ff"
)
#: All scripts that put no space between words.
UNSPACED = CJK + _SOUTH_EAST_ASIAN
_UNSPACED = re.compile(f"[{UNSPACED}]")
# Vowels and repetition marks of Thai, Lao and Khmer that Unicode calls letters, the sound marks of
# half-width kana, and the joiners.
_TRAILING = frozenset(
    "\u0e2f\u0e30\u0e32\u0e33\u0e45\u0e46\u0eaf\u0eb0\u0eb2\u0eb3\u0ec6\u17d7\uff9e\uff9f\u200c\u200d"
)
_TRAILING_CATEGORIES = frozenset({"Mn", "Mc", "Me", "Pc", "Pd", "Pe", "Pf", "Po"})
# Thai and Lao vowels that stand before their consonant, the stackers of Burmese and Khmer, and the
# joiner.
_LEADING = frozenset(
    "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4\u1039\u17d2\u200d"
)
_LEADING_CATEGORIES = frozenset({"Ps", "Pi"})


# Without the letters of Han, Yi and Hangul and what is no character: this runs at every start.
_WITH_MARKS = [
    (chr(code), unicodedata.category(chr(code)))
    for codes in (range(0x3400), range(0xA490, 0xAC00), range(0xF900, 0x10000))
    for code in codes
]


def _members(script: str, categories: Collection[str]) -> str:
    found = [character for character, category in _WITH_MARKS if category in categories]
    return "".join(re.findall(f"[{script}]", "".join(found)))


#: What combines with the character before it, in any script, as the inside of a character class.
COMBINING = _members(r"\0-\uffff", {"Mn", "Mc", "Me"})
#: Chinese and Japanese punctuation and marks by where their word stands: before them, behind them.
CJK_TRAILING = _members(CJK, _TRAILING_CATEGORIES) + "\uff9e\uff9f"
CJK_LEADING = _members(CJK, _LEADING_CATEGORIES)


@functools.cache
def is_unspaced(character: str) -> bool:
    """Whether its script puts no space between words; punctuation counts as its script's."""
    return _UNSPACED.match(character) is not None


@functools.cache
def is_trailing(character: str) -> bool:
    """Whether it belongs to what stands before it: combining marks, dependent vowels, commas."""
    return character in _TRAILING or unicodedata.category(character) in _TRAILING_CATEGORIES


@functools.cache
def is_leading(character: str) -> bool:
    """Whether it belongs to what follows: preposed vowels, stackers, opening brackets."""
    return character in _LEADING or unicodedata.category(character) in _LEADING_CATEGORIES


@functools.cache
def extends_cluster(character: str) -> bool:
    """Whether it is no text of its own: a combining mark, or a vowel that hangs on a consonant."""
    return character in _TRAILING or unicodedata.category(character)[0] == "M"


@functools.cache
def script_of(character: str) -> str:
    """The first word of its Unicode name: its script, or "COMBINING" for marks of any letter."""
    return unicodedata.name(character, "").partition(" ")[0]


def is_word_border(before: str, after: str) -> bool:
    """Whether a word ends between two characters without a space between them."""
    has_unspaced = is_unspaced(before) or is_unspaced(after)
    return has_unspaced and not (is_leading(before) or is_trailing(after))
