"""The units that the word error rate counts."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from oasr_client.errors import ClientError
from oasr_client.manifest import Reference
from oasr_client.sources import Excerpt
from oasr_client.words import split_words, word_errors


def rate(reference: str, heard: str) -> float:
    path = Path("a.wav")
    return word_errors([Reference(path, reference)], {path: heard}).rate


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one  two\tthree", ["one", "two", "three"]),
        ("今天天气很好", list("今天天气很好")),
        ("今天 iPhone很好", ["今", "天", "iphone", "很", "好"]),
        ("ラーメンを食べる", list("ラーメンを食べる")),
        ("วันนี้", ["วั", "น", "นี้"]),
        ("ສະບາຍ", list("ສະບາຍ")),
        ("ខ្មែរ", None),
        ("မြန်မာ", None),
        ("오늘 날씨", ["오늘", "날씨"]),
        ("don’t, DON'T", ["don't,", "don't"]),
        ("", []),
    ],
)
def test_words_are_between_spaces_and_characters_where_there_are_none(
    text: str, words: list[str] | None
) -> None:
    split = split_words(text)
    assert "".join(split) == "".join(
        unicodedata.normalize("NFKC", text.casefold()).split()
    ).replace("’", "'")
    if words is None:
        # The units are clusters: there are several, and none begins with a mark.
        assert len(split) > 1
        assert not any(unicodedata.category(word[0]).startswith("M") for word in split)
    else:
        assert split == [unicodedata.normalize("NFKC", word) for word in words]


@pytest.mark.parametrize(
    ("reference", "heard"),
    [
        (unicodedata.normalize("NFD", "các bạn đã sẵn sàng"), "các bạn đã sẵn sàng"),
        ("今 天 天 气 很 好", "今天天气很好"),
        ("ＦＵＬＬ　ｗｉｄｔｈ", "full width"),
        ("ﬁne", "FINE"),
        ("İstanbul", "istanbul"),
        ("STRASSE", "straße"),
        ("ΟΔΟΣ", "οδος"),
        ("don’t", "DON'T"),
        ("don´t", "DON'T"),
        ("ʼtis", "'tis"),
        ("ไป\u200bมา", "ไปมา"),
    ],
)
def test_ways_to_write_the_same_are_no_error(reference: str, heard: str) -> None:
    assert rate(reference, heard) == 0.0


def test_a_character_is_a_word_where_there_are_no_spaces() -> None:
    assert rate("今天天气很好", "今天天气真好") == pytest.approx(1 / 6)
    assert rate("วันนี้", "วันนั้") == pytest.approx(1 / 3)
    assert rate("one two", "one too") == 0.5


def test_the_text_of_a_whole_file_is_not_scored_against_an_excerpt() -> None:
    path = Path("a.wav")
    excerpt = Excerpt(path, 2.0, 1.0)
    assert word_errors([Reference(excerpt, "one")], {excerpt: "one"}).num_files == 1
    assert word_errors([Reference(excerpt, "one")], {}).num_files == 0
    with pytest.raises(ClientError, match=r"a\.wav from 2 s to 3 s: .*transcribe the excerpt"):
        word_errors([Reference(excerpt, "one")], {path: "one two"})
    # The file has a reference of its own, and its excerpt failed.
    both = [Reference(excerpt, "one"), Reference(path, "one two")]
    assert word_errors(both, {path: "one two"}).num_files == 1
