"""Classes of characters: equal on both sides of the wire, never against Unicode's clusters."""

from __future__ import annotations

import sys
import unicodedata

import pytest
import regex
from oasr_client import scripts as client_scripts

from oasr_backend.text.scripts import (
    CJK,
    CJK_LEADING,
    CJK_TRAILING,
    COMBINING,
    UNSPACED,
    is_leading,
    is_trailing,
    is_unspaced,
    is_word_border,
)


def test_server_and_client_know_the_same_scripts() -> None:
    server, client = regex.compile(f"[{UNSPACED}]"), regex.compile(f"[{client_scripts.UNSPACED}]")
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert server.findall(every) == client.findall(every)


def test_the_marks_are_those_of_the_whole_basic_plane() -> None:
    marks = regex.findall(r"[\p{Mn}\p{Mc}\p{Me}]", _BASIC_PLANE)
    by_python = [c for c in _BASIC_PLANE if unicodedata.category(c) in ("Mn", "Mc", "Me")]
    assert list(COMBINING) == by_python
    assert len(set(marks) & set(COMBINING)) > 1000, "the two know nearly the same Unicode"
    in_cjk = regex.findall(f"[{CJK}]", _BASIC_PLANE)
    leading = [c for c in in_cjk if unicodedata.category(c) in ("Ps", "Pi")]
    assert list(CJK_LEADING) == leading
    closing = {"Mn", "Mc", "Me", "Pc", "Pd", "Pe", "Pf", "Po"}
    trailing = [c for c in in_cjk if unicodedata.category(c) in closing]
    assert list(CJK_TRAILING) == [*trailing, "\uff9e", "\uff9f"]


@pytest.mark.parametrize(
    "script", ["Han", "Hiragana", "Katakana", "Bopomofo", "Thai", "Lao", "Khmer", "Myanmar"]
)
def test_all_letters_of_the_scripts_without_spaces_are_known(script: str) -> None:
    letters = regex.findall(rf"[\p{{{script}}}&&\p{{L}}]", _BASIC_PLANE, flags=regex.V1)
    assert len(letters) > 30
    assert [letter for letter in letters if not is_unspaced(letter)] == []


@pytest.mark.parametrize("character", "AéßЖאह한０Ａ0'.-—“ ")
def test_letters_of_other_scripts_and_common_marks_are_not(character: str) -> None:
    assert not is_unspaced(character)


def test_no_word_ends_inside_a_grapheme_cluster() -> None:
    members = [c for c in _BASIC_PLANE if is_unspaced(c) and unicodedata.category(c) != "Cn"]
    bases = ["ก", "ກ", "က", "ក", "か", "中"]
    for base in bases:
        for member in members:
            for text in (base + member, member + base):
                if is_word_border(text[0], text[1]):
                    assert len(regex.findall(r"\X", text)) == 2, ascii(text)


@pytest.mark.parametrize(
    ("before", "after", "is_border"),
    [
        ("你", "好", True),
        ("你", "A", True),
        ("A", "你", True),
        ("A", "B", False),
        ("好", "，", False),
        ("K", "。", False),
        ("「", "好", False),
        ("好", "「", True),
        ("，", "你", True),
        ("ด", "ี", False),
        ("เ", "ท", False),
        ("บ", "า", False),
        ("ส", "ว", True),
        ("្", "ត", False),
        ("္", "ဂ", False),
        ("်", "ဂ", True),
        ("ｶ", "ﾞ", False),
    ],
)
def test_where_words_end(before: str, after: str, is_border: bool) -> None:
    assert is_word_border(before, after) is is_border


def test_what_leads_and_what_trails() -> None:
    assert all(map(is_leading, "「（“เໂ"))
    assert all(map(is_trailing, "」）”，。ๆัา"))
    assert not any(map(is_leading, "A你ก"))
    assert not any(map(is_trailing, "A你ก「"))


_BASIC_PLANE = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
