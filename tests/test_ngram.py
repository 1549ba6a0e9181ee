"""The n-gram model: its probabilities by definition, and what it does to the beam."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jiwer
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.errors import ConfigError
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.streaming.engine import Engine
from oasr_backend.types import AudioChunk, Hypothesis
from tests.conftest import DEMO_DIR, Clip
from tests.engine_helpers import (
    ask_one,
    assert_all_is_free,
    error_of,
    golden_engine,
    noise,
)
from tests.ngrams import DEVICE, SYMBOLS, Entries, arpa, scorer_of, walk, write
from tests.reference.ctc import PrefixBeam
from tests.rounding import gamma


def plain_log10(entries: Entries, history: tuple[str, ...], unit: str) -> float:
    """By definition, from the longest history to the empty one."""
    if (*history, unit) in entries:
        return entries[(*history, unit)][0]
    if not history:
        return -10.0
    backoff = entries.get(history, (0.0, 0.0))[1]
    return backoff + plain_log10(entries, history[1:], unit)


def plain_score(entries: Entries, text: Sequence[int], *, is_whole: bool = False) -> float:
    """ln P; `is_whole` counts the end too. What the file leaves out is its <unk>, if it has one."""
    unknown = "<unk>" if ("<unk>",) in entries else None
    known = [SYMBOLS[unit] for unit in text]
    known = [unit if (unit,) in entries else unknown or unit for unit in known]
    units = ["<s>", *known, *(["</s>"] if is_whole and ("</s>",) in entries else [])]
    reach = max(map(len, entries)) - 1
    histories = [tuple(units[max(0, end - reach) : end]) for end in range(1, len(units))]
    scores = [plain_log10(entries, h, unit) for h, unit in zip(histories, units[1:], strict=True)]
    return sum(scores) * math.log(10)


@st.composite
def models(draw: st.DrawFn) -> dict[tuple[str, ...], tuple[float, float]]:
    """Random, but every n-gram's beginning and last unit are there, as in every ARPA file."""
    number = st.floats(-3, 0).map(lambda x: round(x, 3))
    entries: dict[tuple[str, ...], tuple[float, float]] = {}
    words = draw(st.sets(st.sampled_from([*SYMBOLS[1:], "<s>", "</s>", "<unk>"]), min_size=1))
    known: list[tuple[str, ...]] = [()]
    for _ in range(draw(st.integers(1, 4))):
        longer = [(*h, word) for h in known for word in sorted(words)]
        known = [g for g in longer if len(g) == 1 or draw(st.integers(0, 3)) == 0]
        if not known:
            break
        entries |= {ngram: (draw(number), draw(number)) for ngram in known}
    return entries


@given(entries=models(), text=st.lists(st.integers(1, 4), max_size=8))
def test_a_text_scores_what_the_definition_says(
    tmp_path_factory: pytest.TempPathFactory, entries: Entries, text: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("lm"), arpa(entries))
    bonus = 0.5 * len(text)
    scorer = scorer_of(path, weight=0.3, unit_bonus=0.5)
    found = walk(scorer, text)
    bound = score_bound(entries, text)
    assert abs(found - (0.3 * plain_score(entries, text) + bonus)) <= bound
    ((whole,),) = scorer.ended([[Hypothesis(tuple(text), found)]])
    assert abs(whole.score - (0.3 * plain_score(entries, text, is_whole=True) + bonus)) <= bound


def score_bound(entries: Entries, text: Sequence[int]) -> float:
    """Each number is rounded as it is read; an n-gram's are added, weighed and given the bonus."""
    sizes = {
        ngram: (-abs(log_prob), -abs(backoff)) for ngram, (log_prob, backoff) in entries.items()
    }
    magnitude = -plain_score(sizes, text, is_whole=True)
    return gamma(max(map(len, entries)) + 3) * (0.3 * magnitude + 0.5 * len(text))


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


def test_only_what_the_file_says_of_unknown_units_counts_for_them(tmp_path: Path) -> None:
    symbols = ["<blank>", "<unk>", "\u2581A", "B"]
    for name in ("<unk>", "<UNK>"):
        entries = {(name,): (-1.0, -0.5), ("B",): (-0.7, 0.0), (name, "B"): (-0.2, 0.0)}
        path = write(tmp_path, arpa(entries))
        scorer = scorer_of(path, symbols=symbols)
        assert walk(scorer, [2]) == pytest.approx(-1.0 * math.log(10)), "log10, not -10"
        assert walk(scorer, [2, 3]) == pytest.approx(-1.2 * math.log(10))
        assert walk(scorer, [1, 3]) == pytest.approx(-1.2 * math.log(10))
    assert walk(scorer_of(write(tmp_path, arpa({("B",): (-0.7, 0.0)}))), [3]) == pytest.approx(
        -10 * math.log(10)
    )


def bigrams(texts: Iterable[str]) -> dict[tuple[str, ...], tuple[float, float]]:
    """Counts over the demo model's units, with absolute discounting."""
    tokenizer = open_checkpoint(DEMO_DIR).load().tokenizer
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
            options=StreamOptions(decoder="prefix_beam", **parameters),
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
    config = ServingConfig.of(lm_path=str(write(tmp_path, arpa(bigrams(truth)))))
    engine = load_engine(DEMO_DIR, config, device="cpu")
    plain, fused = transcribe(engine, clips), transcribe(engine, clips, use_lm=True)
    assert jiwer.wer(truth, fused) < jiwer.wer(truth, plain) - 0.02
    hotwords = transcribe(engine, clips, use_lm=True, hotwords="PROTECTIVE|COMMISSION")
    assert jiwer.wer(truth, hotwords) < jiwer.wer(truth, plain) - 0.02
    assert len(engine.store.decoders.kinds) == 3
    assert_all_is_free(engine)


def test_a_server_without_a_model_refuses_its_use() -> None:
    engine = golden_engine()
    parameters = {"decoder": "prefix_beam", "use_lm": True}
    error_of(ask_one(engine, "a", noise(1), flags="S", parameters=parameters), "use_lm", "lm_path")
    error_of(ask_one(engine, "a", flags="S", parameters={"use_lm": True}), "decoder=prefix_beam")
    with pytest.raises(ConfigError, match="lm_path"):
        golden_engine(decoder="prefix_beam", use_lm=True)
