"""Ids become text as WeNet writes it, words keep their token positions, and text becomes ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from oasr_backend.errors import CheckpointError, StreamStateError
from oasr_backend.text.tokenizer import UnitTokenizer, Word, load_tokenizer

DEMO_DIR = Path(__file__).parent.parent / "model_repository/oasr_streaming/demo_en"
DEMO = load_tokenizer(DEMO_DIR / "units.txt", DEMO_DIR / "bpe.model")
MIXED = UnitTokenizer(
    ["<blank>", "<unk>", "你", "好", "\u2581HE", "LLO", "\u2581", "A", "世", "<sos/eos>"]
)
TRANSCRIPTS = [
    entry["text"]
    for name in ("testset", "eval")
    for entry in json.loads((DEMO_DIR / name / "manifest.json").read_text(encoding="utf-8"))
]


def encoded(tokenizer: UnitTokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    assert ids is not None
    return ids


@pytest.mark.parametrize("text", TRANSCRIPTS[:20])
def test_a_transcript_survives_encoding_and_decoding(text: str) -> None:
    ids = encoded(DEMO, text)
    assert DEMO.decode(ids) == text
    assert [word.text for word in DEMO.words(ids)] == text.split()


@pytest.mark.parametrize("text", TRANSCRIPTS[:20])
def test_encoding_is_the_segmentation_of_sentencepiece_with_ids_of_the_units(text: str) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(DEMO_DIR / "bpe.model"))
    ids = encoded(DEMO, text)
    assert DEMO.pieces(ids) == processor.encode(text, out_type=str)
    assert ids != processor.encode(text, out_type=int)


@given(ids=st.lists(st.integers(2, DEMO.vocab_size - 2), max_size=12))
def test_text_is_what_sentencepiece_makes_of_the_pieces(ids: list[int]) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(DEMO_DIR / "bpe.model"))
    text = processor.decode_pieces(DEMO.pieces(ids))
    assert DEMO.decode(ids) == " ".join(text.split())


@pytest.mark.parametrize("text", TRANSCRIPTS[:20])
def test_without_the_sentencepiece_model_the_units_still_spell_the_text(text: str) -> None:
    tokenizer = load_tokenizer(DEMO_DIR / "units.txt")
    ids = encoded(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert len(ids) <= len(encoded(DEMO, text))


@given(ids=st.lists(st.integers(0, DEMO.vocab_size - 1), max_size=12))
def test_words_are_the_text_and_their_ranges_are_in_order(ids: list[int]) -> None:
    words = DEMO.words(ids)
    assert " ".join(word.text for word in words) == " ".join(DEMO.decode(ids).split())
    ends = [end for word in words for end in (word.first_token, word.last_token)]
    assert ends == sorted(ends)
    for word in words:
        part = ids[word.first_token : word.last_token + 1]
        assert word.text in DEMO.decode(part)


def test_case_of_the_vocabulary_is_found() -> None:
    assert encoded(DEMO, "secret  Service ") == encoded(DEMO, "SECRET SERVICE")


def test_text_that_the_units_cannot_spell_has_no_ids() -> None:
    assert DEMO.encode("naïve 42") is None
    assert MIXED.encode("B") is None
    assert DEMO.encode("  ") == []


def test_blank_sentence_and_unknown_symbols_are_silent() -> None:
    last = DEMO.vocab_size - 1
    ids = [0, *encoded(DEMO, "THE"), 1, last, *encoded(DEMO, "END")]
    assert DEMO.symbol_of(last) == "<sos/eos>"
    assert DEMO.decode(ids) == "THE END"
    assert DEMO.decode([]) == ""
    assert DEMO.words([0, last]) == []


def test_chinese_units_join_without_spaces_and_each_is_a_word() -> None:
    assert MIXED.decode([2, 3, 4, 5, 8, 7]) == "你好 HELLO世A"
    assert MIXED.words([2, 3, 4, 5, 8, 7]) == [
        Word("你", 0, 0),
        Word("好", 1, 1),
        Word("HELLO", 2, 3),
        Word("世", 4, 4),
        Word("A", 5, 5),
    ]
    assert MIXED.encode("你好hello 世") == [2, 3, 4, 5, 8]


def test_a_lone_boundary_starts_a_word_but_is_no_part_of_it() -> None:
    assert MIXED.decode([7, 6, 7, 7]) == "A AA"
    assert MIXED.words([7, 6, 7, 7]) == [Word("A", 0, 0), Word("AA", 2, 3)]


def test_a_space_symbol_is_a_boundary() -> None:
    tokenizer = UnitTokenizer(["<blank>", "<space>", "a", "b"])
    assert tokenizer.decode([1, 2, 3, 1, 3]) == "ab b"
    assert tokenizer.encode("ab b") == [1, 2, 3, 1, 3]


def test_byte_pieces_become_characters() -> None:
    tokenizer = UnitTokenizer(["<blank>", "<0xC3>", "<0xA9>", "\u2581T", "A"])
    assert tokenizer.decode([3, 1, 2, 4]) == "TéA"
    assert tokenizer.words([3, 1, 2, 4]) == [Word("TéA", 0, 3)]
    assert tokenizer.decode([3, 1, 4]) == "T\ufffdA"
    assert tokenizer.decode([3, 1]) == "T"


def test_a_shorter_first_unit_is_taken_when_the_longest_leads_nowhere() -> None:
    tokenizer = UnitTokenizer(["<blank>", "\u2581ab", "\u2581a", "bc"])
    assert tokenizer.encode("abc") == [2, 3]


@pytest.mark.parametrize("token_id", [-1, 258])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(StreamStateError, match=rf"token id {token_id} is outside 0\.\.257"):
        DEMO.decode([token_id])


def test_numpy_ids_are_as_good_as_integers() -> None:
    ids = encoded(DEMO, "THE END")
    assert DEMO.decode(np.array(ids, np.int32).tolist()) == "THE END"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "0 ids"),
        ("<blank> 0\nA\n", "line 2"),
        ("<blank> 0\nA 0\n", "id 0 again"),
        ("<blank> 0\nA 2\n", "without a gap"),
    ],
)
def test_a_broken_units_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "units.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=word):
        load_tokenizer(path)


def test_units_in_any_order_and_odd_symbols_are_read(tmp_path: Path) -> None:
    path = tmp_path / "units.txt"
    path.write_bytes("\ufeffa b 2\r\n\u3000\t1\r\n<blank> 0\r\n\u2028 3\n".encode())
    tokenizer = load_tokenizer(path)
    assert tokenizer.pieces([0, 1, 2, 3]) == ["<blank>", "\u3000", "a b", "\u2028"]


def test_missing_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.txt"):
        load_tokenizer(tmp_path / "nowhere.txt")
    with pytest.raises(CheckpointError, match=r"nowhere\.model"):
        load_tokenizer(DEMO_DIR / "units.txt", tmp_path / "nowhere.model")
    broken = tmp_path / "broken.model"
    broken.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(DEMO_DIR / "units.txt", broken)


@pytest.mark.parametrize(
    "path",
    sorted(Path(__file__).parent.glob("golden/*/units.txt")),
    ids=lambda path: path.parent.name,
)
def test_units_of_the_golden_checkpoints_are_read(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    symbols = tokenizer.pieces(range(tokenizer.vocab_size))
    assert [f"{symbol} {token_id}" for token_id, symbol in enumerate(symbols)] == lines
    ids = list(range(symbols.index("\u2581da"), tokenizer.vocab_size - 1))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
