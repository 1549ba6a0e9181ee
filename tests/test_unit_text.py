"""Text of units in every script: whole, in parts, and as words."""

from __future__ import annotations

import re

import pytest
import regex
from hypothesis import assume, given
from hypothesis import strategies as st

from oasr_backend.text.scripts import CJK, CJK_LEADING, CJK_TRAILING
from oasr_backend.text.tokenizer import UnitTokenizer
from oasr_backend.text.unit_text import START, Word
from tests.vocabularies import TOKENIZERS

EACH_KIND = pytest.mark.parametrize("kind", TOKENIZERS)


def units(*symbols: str) -> UnitTokenizer:
    return UnitTokenizer(["<blank>", "<unk>", *symbols, "<sos/eos>"])


def text_of(*symbols: str, vocabulary: UnitTokenizer | None = None) -> str:
    tokenizer = vocabulary or units(*dict.fromkeys(symbols))
    symbol_ids = {
        symbol: i for i, symbol in enumerate(tokenizer.pieces(range(tokenizer.vocab_size)))
    }
    return tokenizer.decode([symbol_ids[symbol] for symbol in symbols])


def bytes_of(value: bytes) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in value]


BYTES = units(*(f"<0x{value:02X}>" for value in range(256)), "▁T", "A")


@pytest.mark.parametrize(
    ("symbols", "text"),
    [
        (["▁T", *bytes_of(b"\xe4")], "T"),
        (["▁T", *bytes_of(b"\xe4\xbd")], "T"),
        (["▁T", *bytes_of("你".encode())], "T你"),
        (["▁T", *bytes_of(b"\xe4\xbd"), "A"], "T\ufffdA"),
        (["▁T", *bytes_of(b"\xe4\xc3\xa9"), "A"], "T\ufffdéA"),
        (["▁T", *bytes_of(b"\xff\xff\xbd"), "A"], "T\ufffdA"),
        (["▁T", *bytes_of(b"\xe4"), "<unk>", *bytes_of(b"\xbd\xa0"), "A"], "T\ufffdA"),
        (["▁T", *bytes_of(b" \xc3\xa9"), "▁T"], "T é T"),
        (["▁T", *bytes_of("e \u0301 \u0f7d".encode()), "▁T"], "Te\u0301\u0f7d T"),
    ],
)
def test_bytes_are_characters_once_complete_and_one_replacement_if_never(
    symbols: list[str], text: str
) -> None:
    assert text_of(*symbols, vocabulary=BYTES) == text


@pytest.mark.parametrize(
    ("symbols", "text"),
    [
        (["你", "好", "，", "▁OK"], "你好， OK"),
        (["▁贺", "▁生"], "贺生"),
        (["今", "▁", "天"], "今天"),
        (["▁今天", "▁，", "▁ラ", "ー", "▁メン"], "今天，ラーメン"),
        (["▁OK", "▁贺", "▁GOOD"], "OK 贺 GOOD"),
        (["你", "好", "hello", "world", "好"], "你好 hello world 好"),
        (["你", "hello", "，", "world", "。"], "你 hello， world。"),
        (["你", "U", "S", "A", "today"], "你USA today"),
        (["2023", "年", "mp3", "x-ray"], "2023年 mp3 x-ray"),
        (["你", "▁", "hello", "wor", "ld"], "你 helloworld"),
        (["▁贺", "hello", "world"], "贺 hello world"),
        (["hello", "world"], "helloworld"),
        (["▁วัน", "นี้", "▁ok"], "วันนี้ ok"),
        (["▁วัน", "▁นี้"], "วัน นี้"),
        (["▁wor", "ld", "▁、", "▁A"], "world、 A"),
        (["▁A", "▁B", "▁。"], "A B。"),
        (["文", "▁c", "d", "▁！", "▁", "？"], "文 cd！？"),
        (["▁A", "▁「", "▁OK", "▁」", "▁B"], "A 「OK」 B"),
        (["▁한", "국", "▁，", "▁어"], "한국， 어"),
        (["▁A", "▁,", "▁B", "▁。"], "A , B。"),
    ],
)
def test_spaces_stand_where_the_script_has_them(symbols: list[str], text: str) -> None:
    assert text_of(*symbols) == text


@pytest.mark.parametrize(
    ("symbols", "text"),
    [
        (["▁A", "▁", "▁B"], "A B"),
        (["▁", "▁▁A", "▁"], "A"),
        (["<space>", "a", "<space>", "<space>", "b"], "a b"),
        (["a", "\u3000", "b"], "a b"),
    ],
)
def test_there_is_never_a_second_space_or_one_at_an_end(symbols: list[str], text: str) -> None:
    assert text_of(*symbols) == text


def test_control_units_are_left_out() -> None:
    assert text_of("▁THE", "<unk>", "<noise>", "▁EN", "<|zh|>", "D") == "THE END"
    assert text_of("a", "<", "b", ">") == "a<b>", "signs of their own are no control units"


@pytest.mark.parametrize(
    ("symbols", "words"),
    [
        (["你", "好", "，", "▁OK", "。"], ["你", "好，", "OK。"]),
        (["今天", "「", "好", "」", "▁A"], ["今天", "「好」", "A"]),
        (["你", "▁", "，", "好"], ["你，", "好"]),
        (["你", "hello", "，", "world"], ["你", "hello，", "world"]),
        (["▁wor", "ld", "▁、", "▁「", "▁A", "▁」"], ["world、", "「A」"]),
        (["▁A", "▁,", "▁B", "▁。"], ["A", ",", "B。"]),
        (list("สวัสดี"), ["ส", "วั", "ส", "ดี"]),
        (["สวัสดี", "ครับ", "ๆ"], ["สวัสดี", "ครับๆ"]),
        (["เ", "ธ", "อ", "▁วัน"], ["เธ", "อ", "วัน"]),
        (list("ស្តី"), ["ស្តី"]),
        (list("မင်္ဂလာ"), ["မ", "င်္ဂ", "လာ"]),
        (["▁THE", "RE", ",", "▁A", "<unk>", "B"], ["THERE,", "AB"]),
    ],
)
def test_words_end_where_their_script_lets_them(symbols: list[str], words: list[str]) -> None:
    tokenizer = units(*dict.fromkeys([*symbols, "▁ok"]))
    known = tokenizer.pieces(range(tokenizer.vocab_size))
    found = tokenizer.words([known.index(symbol) for symbol in symbols])
    assert [word.text for word in found] == words


def test_a_character_of_bytes_is_a_word_of_its_tokens() -> None:
    ids = [BYTES.pieces(range(BYTES.vocab_size)).index(s) for s in bytes_of("你好".encode())]
    assert BYTES.words(ids[:5]) == [Word("你", 0, 2)]
    assert BYTES.words(ids) == [Word("你", 0, 2), Word("好", 3, 5)]


@pytest.mark.parametrize("text", ["贺生", "生贺", "贺OK生"])
def test_marked_han_units_spell_a_phrase(text: str) -> None:
    tokenizer = units("▁贺", "▁生", "▁OK")
    ids = tokenizer.encode(text)
    assert ids is not None
    assert tokenizer.decode(ids).replace(" ", "") == text


def test_unmarked_latin_words_among_marked_han_are_spelt() -> None:
    tokenizer = units("▁贺", "▁生", "OK")
    assert tokenizer.encode("贺 ok生") == [2, 4, 3]
    assert tokenizer.decode([2, 4, 3]) == "贺 OK 生"


@EACH_KIND
@given(data=st.data())
def test_a_text_made_in_parts_is_the_text_of_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=14))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4).map(sorted))
    text, joint = "", START
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        part, joint = tokenizer.joined(ids[begin:end], joint)
        text += part
        assert text == tokenizer.decode(ids[:end])


@EACH_KIND
@given(data=st.data())
def test_words_are_the_text_and_their_tokens_are_in_order(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=14))
    text, words = tokenizer.decode(ids), tokenizer.words(ids)
    assert not re.search(f"  |^ | $|\ufffd\ufffd|[{CJK}] [{CJK}]", text)
    assert not re.search(f" [{CJK_TRAILING}]|[{CJK_LEADING}] ", text)
    assert "".join(word.text for word in words) == text.replace(" ", "")
    at, borders = 0, set()
    for word in words:
        at += text.startswith(" ", at)
        borders.add(at)
        assert text.startswith(word.text, at)
        at += len(word.text)
    # No orthography has a vowel between a stacker and the letter below it.
    assume(not regex.search(r"[\u1039\u17d2]\p{M}", text))
    clusters = {match.start() for match in regex.finditer(r"\X", text)}
    assert borders <= clusters
    ranges = [(word.first_token, word.last_token) for word in words]
    assert ranges == sorted(ranges)
    assert all(first <= last for first, last in ranges)


@EACH_KIND
def test_what_starts_a_word_never_goes_on_with_a_cluster(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for unit in range(tokenizer.vocab_size):
        first = tokenizer.decode([unit])[:1]
        if tokenizer.starts_word(unit) and first:
            assert len(regex.findall(r"\X", f"ก{first}")) == 2
