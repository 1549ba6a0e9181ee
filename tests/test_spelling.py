"""Phrases become the units that the model was trained to say, bytes only where it says bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.options import StreamOptions
from oasr_backend.text.tokenizer import UnitTokenizer
from tests.conftest import DEMO_DIR

TEXTS = [
    entry["text"]
    for entry in json.loads((DEMO_DIR / "eval" / "manifest.json").read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer(tmp_path_factory: pytest.TempPathFactory) -> UnitTokenizer:
    """Units of upper-case English with all 256 bytes to fall back to, and the model that cuts."""
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "bpe"),
        model_type="bpe",
        vocab_size=350,
        byte_fallback=True,
        minloglevel=2,
    )
    return with_model(folder / "bpe.model")


def with_model(path: Path) -> UnitTokenizer:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [processor.id_to_piece(number) for number in range(1, processor.get_piece_size())]
    return UnitTokenizer(["<blank>", "<unk>", *pieces], bpe_model_path=path)


def spelt(tokenizer: UnitTokenizer, phrase: str) -> list[str]:
    ids = tokenizer.encode(phrase)
    assert ids is not None
    assert tokenizer.decode(ids).upper() == phrase.upper()
    return tokenizer.pieces(ids)


@pytest.mark.parametrize("phrase", ["SECRET SERVICE", "secret service", "Secret Service"])
def test_another_case_of_the_letters_comes_before_bytes(
    tokenizer: UnitTokenizer, phrase: str
) -> None:
    assert spelt(tokenizer, phrase) == spelt(tokenizer, "SECRET SERVICE")
    assert not any(piece.startswith("<0x") for piece in spelt(tokenizer, phrase))


@pytest.mark.parametrize("phrase", ["CAFÉ", "café", "Café"])
def test_bytes_spell_only_what_no_case_has_units_for(tokenizer: UnitTokenizer, phrase: str) -> None:
    in_bytes = [piece for piece in spelt(tokenizer, phrase) if piece.startswith("<0x")]
    assert in_bytes == ["<0xC3>", "<0x89>"]


def test_hotwords_are_favoured_as_the_model_would_say_them(tokenizer: UnitTokenizer) -> None:
    spelling = HotwordSpelling(tokenizer, tokenizer.vocab_size)
    lower, upper = (
        spelling.graph(StreamOptions(decoder="prefix_beam", hotwords=phrase))
        for phrase in ("treasury", "TREASURY")
    )
    assert (lower.class_V == upper.class_V).all()
    assert (lower.held_S == upper.held_S).all()


class CountedUnits(dict[str, int]):
    """Units by their text, and how often one was looked for."""

    num_looks = 0

    def __contains__(self, text: object) -> bool:
        self.num_looks += 1
        return super().__contains__(text)


@pytest.mark.parametrize("phrase", ["SECRET SERVICE ", "A", "\u2603"])
def test_the_steps_of_spelling_grow_with_the_length_alone(phrase: str) -> None:
    tokenizer = UnitTokenizer(["<blank>", "▁", *"ACEIRSTV", "▁SE", "CRET", "<unk>"])
    counted = CountedUnits(tokenizer._spellings)
    tokenizer._spellings = counted
    looks = []
    for repeats in (100, 200):
        counted.num_looks = 0
        tokenizer.encode("".join([phrase] * repeats))
        looks.append(counted.num_looks)
    assert 0 < looks[1] <= 2 * looks[0] + 100


def test_a_phrase_of_nothing_that_can_be_said_is_not_spelt(tokenizer: UnitTokenizer) -> None:
    assert tokenizer.encode("\u200b") is None
    assert tokenizer.encode(" ") == []
