"""Texts that grow answer by answer and segments that spell them, for vocabularies of every kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from oasr_client.subtitles import Cue, make_cues

from oasr_backend.checkpoints import Checkpoint, load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.alignment import Timing
from oasr_backend.text.endpointing import EndpointRules
from oasr_backend.text.scripts import extends_cluster, script_of
from oasr_backend.text.segments import Heard, Segments
from oasr_backend.text.tokenizer import UnitTokenizer
from oasr_backend.types import Hypothesis
from tests.conftest import DEMO_DIR, Clip
from tests.engine_helpers import ask_one
from tests.result_schema import check_document, joined_segments
from tests.vocabularies import SYMBOLS, TOKENIZERS, vocabulary

RULES = EndpointRules(silence_frames=5, start_silence_frames=20, most_frames=12, cluster_frames=15)
EACH_KIND = pytest.mark.parametrize("kind", TOKENIZERS)


def told(
    segments: Segments, whole: Hypothesis, num_frames: int, *, is_final: bool = False
) -> list[dict[str, Any]]:
    """The segments of a stream that has heard so much of the whole."""
    known = sum(frame < num_frames for frame in whole.times)
    heard = Heard(Timing(0.04, num_frames * 0.04), num_frames, "end" if is_final else None)
    rest = whole.first(known).without_first(segments.num_closed_tokens)
    return segments.told(rest, heard, tells_open=True)


def spoken(ids: list[int], gaps: list[int]) -> Hypothesis:
    frames = np.cumsum(gaps[: len(ids)]).tolist()
    return Hypothesis(tuple(ids), 0.0, tuple(frames), (0.0,) * len(ids))


@EACH_KIND
@given(data=st.data())
def test_segments_spell_the_text_whenever_one_looks(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=14))
    gaps = data.draw(st.lists(st.integers(1, 30), min_size=len(ids), max_size=len(ids)))
    looks = data.draw(st.lists(st.integers(0, sum(gaps) + 40), max_size=4).map(sorted))
    whole, segments = spoken(ids, gaps), Segments(RULES, tokenizer)
    for num_frames in [*looks, sum(gaps) + 10]:
        known = sum(frame < num_frames for frame in whole.times)
        spelt = joined_segments(told(segments, whole, num_frames))
        assert spelt == tokenizer.decode(ids[:known])
    num_frames = max([*looks, sum(gaps) + 10])
    last = told(segments, whole, num_frames)
    final = told(Segments(RULES, tokenizer), whole, num_frames, is_final=True)
    assert joined_segments(final) == tokenizer.decode(ids)
    assert [entry["text"] for entry in final] == [entry["text"] for entry in last]


@pytest.mark.parametrize("kind", ["thai", "lao, khmer and burmese", "han and marked latin"])
@given(data=st.data())
def test_neither_silence_nor_length_parts_a_cluster(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    units = [u for u in range(tokenizer.vocab_size) if tokenizer.symbol_of(u) != "▁"]
    ids = data.draw(st.lists(st.sampled_from(units), max_size=14))
    gaps = data.draw(
        st.lists(st.integers(1, RULES.cluster_frames), min_size=len(ids), max_size=len(ids))
    )
    entries = told(Segments(RULES, tokenizer), spoken(ids, gaps), sum(gaps) + 9, is_final=True)
    said = ""
    for text in filter(None, (entry["text"] for entry in entries)):
        # A mark of another script than the letter before it belongs to no spelling.
        if said and script_of(said[-1]) == script_of(text[0]):
            assert not extends_cluster(text[0])
        said += text


def borders_of(
    symbols: list[str], gaps: list[int], rules: EndpointRules, *, num_frames: int
) -> list[tuple[str, str | None]]:
    tokenizer = UnitTokenizer(["<blank>", "<unk>", *dict.fromkeys([*symbols, "▁ok"])])
    known = tokenizer.pieces(range(tokenizer.vocab_size))
    whole = spoken([known.index(symbol) for symbol in symbols], gaps)
    entries = told(Segments(rules, tokenizer), whole, num_frames)
    return [(entry["text"], entry["reason"]) for entry in entries]


@pytest.mark.parametrize(
    ("symbols", "texts"),
    [
        (["บ", "เ", "กมดี", "็ย", "รัส", "ฯ", "ส"], ["บ", "เกมดี็ย", "รัสฯ", "ส"]),
        (["ក", "្", "ក", "ា", "ក"], ["ក្កា", "ក"]),
        (["नम", "स", "▁ते", "े", "न"], ["नम", "स", "तेे", "न"]),
        (["ｶ", "ﾞ", "ｶ"], ["ｶﾞ", "ｶ"]),
        (["▁cafe", "\u0301", "▁ok"], ["cafe\u0301", "ok"]),
        (["文", "（", "A", "）", "。", "文"], ["文", "（A", "）", "。", "文"]),
        (["<0xE4>", "<0xBD>", "<0xA0>", "<0xE4>", "<0xBD>", "<0xA0>"], ["你", "你"]),
        (["▁THE", "RE", "▁ok"], ["THE", "RE", "ok"]),
    ],
)
def test_a_silence_is_no_border_inside_a_cluster(symbols: list[str], texts: list[str]) -> None:
    gap = RULES.silence_frames + 1
    rules = dataclasses.replace(RULES, most_frames=0)
    found = borders_of(symbols, [gap] * len(symbols), rules, num_frames=gap * len(symbols) + 1)
    assert [text for text, _reason in found] == texts


def test_a_border_waits_for_a_cluster_that_may_go_on_but_not_longer_than_one_lasts() -> None:
    at_once, held = 2 + RULES.silence_frames, 2 + RULES.cluster_frames
    for symbols, frames in ((["▁THE"], at_once), (["ส", "ี"], held)):
        gaps = [1] * len(symbols)
        begin, text = len(symbols) - 1, "".join(symbols).strip("▁")
        assert borders_of(symbols, gaps, RULES, num_frames=begin + frames - 1) == [(text, None)]
        assert borders_of(symbols, gaps, RULES, num_frames=begin + frames) == [(text, "silence")]


@pytest.mark.parametrize(
    ("text", "borders"),
    [
        ("สวัสดีครับ", ["ส", "วั", "ส", "ดี", "ค", "รั", "บ"]),
        ("ສະບາຍດີ", ["ສະ", "ບາ", "ຍ", "ດີ"]),
        ("សួស្តី", ["សួ", "ស្តី"]),
        ("မင်္ဂလာပါ", ["မ", "င်္ဂ", "လာ", "ပါ"]),
    ],
)
@pytest.mark.parametrize("mark", ["▁ok", "ok"], ids=["marked", "no marks"])
def test_a_long_segment_ends_at_a_cluster_in_scripts_without_spaces(
    text: str, borders: list[str], mark: str
) -> None:
    units = ["<blank>", "<unk>", *sorted(set(text)), mark, "<sos/eos>"]
    tokenizer = type(TOKENIZERS["thai"])(units)
    ids = [units.index(character) for character in text]
    rules = dataclasses.replace(RULES, silence_frames=100, most_frames=1)
    whole = spoken(ids, [2] * len(ids))
    entries = told(Segments(rules, tokenizer), whole, 2 * len(ids) + 1, is_final=True)
    assert [entry["text"] for entry in entries] == borders
    assert {entry["reason"] for entry in entries[:-1]} == {"length"}


def test_a_segment_joins_the_one_before_where_the_text_has_no_space() -> None:
    tokenizer = TOKENIZERS["han and marked latin"]
    ids = {symbol: unit for unit, symbol in enumerate(tokenizer.pieces(range(16)))}
    spoken_symbols = ["你", "▁OK", "GO", "<unk>", "好"]
    whole = spoken([ids[symbol] for symbol in spoken_symbols], [10] * 5)
    entries = told(Segments(RULES, tokenizer), whole, 60, is_final=True)
    assert [(e["text"], e.get("joins_previous")) for e in entries] == [
        ("你", None), ("OK", None), ("GO", True), ("", None), ("好", True),
    ]  # fmt: skip


@pytest.fixture(scope="module", name="demo")
def _demo() -> Checkpoint:
    return load_wenet(DEMO_DIR)


@pytest.mark.parametrize("decoder", ["greedy", "prefix_beam"])
@pytest.mark.parametrize("kind", SYMBOLS)
def test_every_answer_of_a_stream_is_the_text_of_all_its_tokens(
    kind: str, decoder: str, demo: Checkpoint, clips: list[Clip]
) -> None:
    tokenizer = vocabulary(kind, demo.model.vocab_size)
    checkpoint = dataclasses.replace(demo, tokenizer=tokenizer)
    engine = Engine(checkpoint, ServingConfig(max_streams=1), device=torch.device("cpu"))
    pieces = np.array_split(soundfile.read(clips[0].path, dtype="float32")[0], 6)
    options = {
        "decoder": decoder, "word_times": True, "endpoint": True,
        "endpoint_silence_s": 0.1, "endpoint_max_s": 0.5,
    }  # fmt: skip
    texts = set()
    for number, piece_S in enumerate(pieces):
        flags = "S" * (number == 0) + "E" * (number == 5)
        parameters = options if number == 0 else {}
        result = ask_one(
            engine, "a", piece_S, flags=flags, parameters=parameters, wants_result=True
        )
        assert result.document is not None
        document = dict(result.document)
        assert document["text"] == result.text
        assert result.text == tokenizer.decode([token["id"] for token in document["tokens"]])
        texts.add(result.text)
    assert len(texts) > 3
    assert len(check_document(document)["segments"]) > 1
    check_captions(make_cues(document), document["text"])
    check_captions(make_cues({**document, "words": []}), document["text"])


def check_captions(cues: list[Cue], text: str) -> None:
    """They are pieces of the text in order, and each is there for a while."""
    at = 0
    for cue in cues:
        at += text.startswith(" ", at)
        assert text.startswith(cue.text, at)
        at += len(cue.text)
        assert cue.text
        assert cue.start_s < cue.end_s
    assert at == len(text)
