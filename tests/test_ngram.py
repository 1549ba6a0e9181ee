"""The n-gram model: its file, its probabilities by definition, and what it does to the beam."""

from __future__ import annotations

import gzip
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.checkpoints import load_wenet
from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.decoders.arpa import load_arpa
from oasr_backend.decoders.ngram import NgramScorer
from oasr_backend.engine import Engine
from oasr_backend.errors import ConfigError
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR, Clip
from tests.engine_helpers import ask_one, assert_all_is_free, error_of, golden_engine, noise
from tests.reference.ctc import PrefixBeam

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SYMBOLS = ["<blank>", "\u2581A", "B", "C", "\u2581D"]
Entries = Mapping[tuple[str, ...], tuple[float, float]]


def arpa(entries: Entries) -> str:
    """The file of entries n-gram -> (log10 probability, log10 backoff)."""
    order = max(map(len, entries))
    sections = []
    for n in range(1, order + 1):
        lines = [
            f"{log_prob:.6f}\t{' '.join(ngram)}" + (f"\t{backoff:.6f}" if n < order else "")
            for ngram, (log_prob, backoff) in entries.items()
            if len(ngram) == n
        ]
        sections.append("\n".join([f"\\{n}-grams:", *lines, ""]))
    return "\n".join(["\\data\\", "ngram 1=5", "", *sections, "\\end\\", ""])


def write(folder: Path, text: str) -> Path:
    path = folder / "lm.arpa"
    path.write_text(text, encoding="utf-8")
    return path


def plain_log10(entries: Entries, history: tuple[str, ...], unit: str) -> float:
    """By definition, from the longest history to the empty one."""
    if (*history, unit) in entries:
        return entries[(*history, unit)][0]
    if not history:
        return -10.0
    backoff = entries.get(history, (0.0, 0.0))[1]
    return backoff + plain_log10(entries, history[1:], unit)


def plain_score(entries: Entries, text: Sequence[int]) -> float:
    units = ["<s>", *(SYMBOLS[unit] for unit in text)]
    reach = max(map(len, entries)) - 1
    histories = [tuple(units[max(0, end - reach) : end]) for end in range(1, len(units))]
    scores = [plain_log10(entries, h, unit) for h, unit in zip(histories, units[1:], strict=True)]
    return sum(scores) * math.log(10)


@st.composite
def models(draw: st.DrawFn) -> dict[tuple[str, ...], tuple[float, float]]:
    """Random, but every n-gram's history is there, as in every ARPA file."""
    number = st.floats(-3, 0).map(lambda x: round(x, 3))
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    known: list[tuple[str, ...]] = [()]
    for _ in range(draw(st.integers(1, 3))):
        follow = ["<s>", *SYMBOLS[1:]] if known == [()] else SYMBOLS[1:]
        longer = [(*h, unit) for h in known for unit in follow]
        known = [g for g in longer if len(g) == 1 or draw(st.integers(0, 3)) == 0]
        if not known:
            break
        entries |= {ngram: (draw(number), draw(number)) for ngram in known}
    return entries


def walk(scorer: NgramScorer, text: Sequence[int]) -> float:
    state_NB, total = torch.full((1, 1), scorer.initial_state, device=DEVICE), 0.0
    for unit in text:
        chunk = scorer.for_chunk(np.zeros(1, np.int64), torch.tensor([[[-1, unit]]], device=DEVICE))
        gain_NBC, next_NBC = chunk.extend(0, state_NB)
        total, state_NB = total + float(gain_NBC[0, 0, 1]), next_NBC[..., 1]
    return total


def scorer_of(path: Path, *, weight: float = 1.0, unit_bonus: float = 0.0) -> NgramScorer:
    model = load_arpa(path, SYMBOLS)
    return NgramScorer(model, weight=weight, unit_bonus=unit_bonus, device=DEVICE)


@given(entries=models(), text=st.lists(st.integers(1, 4), max_size=8))
def test_a_text_scores_what_the_definition_says(
    tmp_path_factory: pytest.TempPathFactory, entries: Entries, text: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("lm"), arpa(entries))
    expected = 0.3 * plain_score(entries, text) + 0.5 * len(text)
    found = walk(scorer_of(path, weight=0.3, unit_bonus=0.5), text)
    assert found == pytest.approx(expected)


@settings(max_examples=30)
@given(entries=models(), seed=st.integers(0, 2**31), cut=st.integers(0, 15))
def test_the_fused_beam_equals_the_plain_search(
    tmp_path_factory: pytest.TempPathFactory, entries: Entries, seed: int, cut: int
) -> None:
    path = write(tmp_path_factory.mktemp("lm"), arpa(entries))
    scorer = scorer_of(path, weight=0.8, unit_bonus=0.4)
    config = GpuDecoderConfig(beam_size=4, token_candidates=4)
    decoder = GpuStreamingDecoder(config, DEVICE, scorers=[scorer])
    states = [decoder.create_state(1, 5) for _ in range(3)]
    generator = torch.Generator().manual_seed(seed)
    logits_NTV = torch.randn((3, 15, 5), generator=generator) * 2.0
    log_probs_NTV = logits_NTV.log_softmax(-1)
    for chunk_NTV in torch.tensor_split(log_probs_NTV, [cut], dim=1):
        decoder.decode_chunk_batch(chunk_NTV.to(DEVICE), states)
    for state, log_probs_TV in zip(states, log_probs_NTV, strict=True):
        search = PrefixBeam(4, 4, bonus=lambda p: 0.8 * plain_score(entries, p) + 0.4 * len(p))
        for log_probs_V in log_probs_TV.double().numpy():
            search.frame(log_probs_V)
        expected = [score + search.bonus(prefix) for prefix, score in search.nbest()]
        assert [one.score for one in decoder.nbest(state, 4)] == pytest.approx(expected)


UNIGRAMS: dict[tuple[str, ...], tuple[float, float]] = {
    ("\u2581A",): (-0.5, 0.0),
    ("B",): (-0.7, 0.0),
}


def test_a_packed_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "lm.arpa.gz"
    path.write_bytes(gzip.compress(arpa(UNIGRAMS).encode()))
    assert walk(scorer_of(path), [1, 2]) == pytest.approx(-1.2 * math.log(10))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mmap lm http://kheafield.com/code format version 5", ["no n-grams", "ARPA"]),
        ("\\1-grams:\nx\tB\n", ["line 2", "no 1-gram"]),
        ("\\1-grams:\n-1.0\n", ["line 2", "no 1-gram"]),
        ("\\2-grams:\n-1.0\tB C B B\n", ["line 2", "no 2-gram"]),
        ("\\1-grams:\n-1.0\tHELLO\n", ["line 2", "'HELLO'", "units.txt", "not on words"]),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_arpa(write(tmp_path, text), SYMBOLS)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.arpa"):
        load_arpa(tmp_path / "nowhere.arpa", SYMBOLS)


def bigrams(texts: Iterable[str]) -> dict[tuple[str, ...], tuple[float, float]]:
    """Counts over the demo model's units, with absolute discounting."""
    tokenizer = load_wenet(DEMO_DIR).tokenizer
    pairs: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        units = ["<s>", *tokenizer.pieces(tokenizer.encode(text) or [])]
        pairs.update(itertools.pairwise(units))
    singles = Counter(pair[1] for pair in pairs.elements())
    total, before = sum(singles.values()), Counter(pair[0] for pair in pairs.elements())
    kinds = Counter(pair[0] for pair in pairs)
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    for unit in {*singles, "<s>"}:
        backoff = math.log10(0.5 * kinds[unit] / before[unit]) if before[unit] else 0.0
        entries[(unit,)] = (math.log10(max(singles[unit], 1) / total), backoff)
    for pair, count in pairs.items():
        entries[pair] = (math.log10((count - 0.5) / before[pair[0]]), 0.0)
    return entries


def transcribe(engine: Engine, clips: Sequence[Clip], **parameters: Any) -> list[str]:
    results = engine.process([
        AudioChunk(
            index,
            soundfile.read(clip.path, dtype="float32")[0],
            is_first=True,
            is_last=True,
            parameters={"decoder": "prefix_beam", **parameters},
        )
        for index, clip in enumerate(clips)
    ])  # fmt: skip
    assert [result.error for result in results] == [None] * len(clips)
    return [result.text for result in results]


def test_a_model_of_what_is_said_lowers_the_error_rate(
    tmp_path: Path, all_clips: list[Clip]
) -> None:
    """The mechanism only: the n-grams come from the very texts, so the gain says nothing else."""
    clips, truth = all_clips[:12], [clip.text for clip in all_clips[:12]]
    config = ServingConfig(lm_path=str(write(tmp_path, arpa(bigrams(truth)))))
    engine = Engine.load(DEMO_DIR, config, device="cpu")
    plain, fused = transcribe(engine, clips), transcribe(engine, clips, use_lm=True)
    assert jiwer.wer(truth, fused) < jiwer.wer(truth, plain) - 0.02
    hotwords = transcribe(engine, clips, use_lm=True, hotwords="PROTECTIVE|COMMISSION")
    assert jiwer.wer(truth, hotwords) < jiwer.wer(truth, plain) - 0.02
    assert len(engine.caches.ctc.kinds) == 3
    assert_all_is_free(engine)


def test_a_server_without_a_model_refuses_its_use() -> None:
    engine = golden_engine()
    parameters = {"decoder": "prefix_beam", "use_lm": True}
    error_of(ask_one(engine, "a", noise(1), flags="S", parameters=parameters), "use_lm", "lm_path")
    error_of(ask_one(engine, "a", flags="S", parameters={"use_lm": True}), "decoder=prefix_beam")
    with pytest.raises(ConfigError, match="lm_path"):
        golden_engine(decoder="prefix_beam", use_lm=True)
