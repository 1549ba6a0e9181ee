from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.decoders import GpuDecoderConfig, GpuDecoderResult, GpuStreamingDecoder
from tests.reference.ctc import best_alignment, prefix_beam
from tests.rounding import ctc_score_bound
from tests.same_results import assert_same_results

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_KEYS = [
    (folder.name, key[: -len(".beam")])
    for folder in sorted(GOLDEN.iterdir())
    if folder.is_dir()
    for key in np.load(folder / "expected.npz").files
    if key.endswith(".beam")
]


def random_log_probs(seed: int, shape: tuple[int, ...], *, sharpness: float) -> torch.Tensor:
    """Sharpness below 1 is flat, above 5 peaky; blank is made likely."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * sharpness
    logits[..., 0] += sharpness
    return torch.log_softmax(logits, dim=-1)


def decode(
    log_probs_TV: torch.Tensor, config: GpuDecoderConfig, cuts: Sequence[int] = ()
) -> GpuDecoderResult:
    decoder = GpuStreamingDecoder(config)
    decoder.init_stream(1, log_probs_TV.shape[1])
    for chunk_TV in torch.tensor_split(log_probs_TV, sorted(cuts)):
        decoder.decode_chunk(chunk_TV[None])
    decoder.check_integrity()
    return decoder.finalize_stream()


def assert_equals_reference(
    result: GpuDecoderResult,
    log_probs_TV: torch.Tensor,
    config: GpuDecoderConfig,
    *,
    entry: int = 0,
) -> None:
    expected = prefix_beam(
        log_probs_TV.double().numpy(),
        config.beam_size,
        config.token_candidates,
        threshold=config.blank_threshold,
    )[: config.nbest]
    assert [tuple(tokens) for tokens in result.tokens[entry]] == [p for p, _ in expected]
    for found, (_, score) in zip(result.scores[entry], expected, strict=True):
        assert found == pytest.approx(score, abs=ctc_score_bound(len(log_probs_TV), score))


@pytest.mark.numerics
@pytest.mark.parametrize("chunk_frames", [5, 16])
@pytest.mark.parametrize(("folder", "key"), GOLDEN_KEYS)
def test_the_beam_equals_wenets_on_the_goldens(folder: str, key: str, chunk_frames: int) -> None:
    golden = np.load(GOLDEN / folder / "expected.npz")
    log_probs_TV = torch.from_numpy(golden[f"{key}.logp"])
    cuts = range(chunk_frames, len(log_probs_TV), chunk_frames)
    result = decode(log_probs_TV, GpuDecoderConfig(), cuts)
    assert result.best() == golden[f"{key}.beam"].tolist()
    score = float(golden[f"{key}.beam_score"])
    assert result.scores[0][0] == pytest.approx(
        score, abs=ctc_score_bound(len(log_probs_TV), score)
    )


@pytest.mark.numerics
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    sharpness=st.sampled_from([0.01, 0.5, 2.0, 8.0, 40.0]),
    vocab_size=st.integers(2, 30),
    beam_size=st.integers(1, 12),
    width=st.integers(1, 12),
    num_frames=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_any_cut_of_any_log_probs_equals_the_reference(
    seed: int,
    sharpness: float,
    vocab_size: int,
    beam_size: int,
    width: int,
    num_frames: int,
    cuts: list[int],
) -> None:
    config = GpuDecoderConfig(beam_size=beam_size, token_candidates=width, nbest=beam_size)
    log_probs_TV = random_log_probs(seed, (num_frames, vocab_size), sharpness=sharpness)
    cuts = [min(cut, num_frames) for cut in cuts]
    assert_equals_reference(decode(log_probs_TV, config, cuts), log_probs_TV, config)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), threshold=st.floats(0.05, 0.99))
def test_frames_of_near_certain_blank_are_skipped(seed: int, threshold: float) -> None:
    config = GpuDecoderConfig(blank_threshold=threshold, nbest=10)
    log_probs_TV = random_log_probs(seed, (30, 12), sharpness=4.0)
    result = decode(log_probs_TV, config, [7, 8, 21])
    assert_equals_reference(result, log_probs_TV, config)


def spell(frames: Sequence[int], *, vocab_size: int = 4) -> torch.Tensor:
    """Log-probs whose best path is `frames`."""
    logits = torch.full((len(frames), vocab_size), -8.0)
    logits[torch.arange(len(frames)), torch.tensor(frames)] = 8.0
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("decoder", ["greedy", "prefix_beam"])
@pytest.mark.parametrize("threshold", [1.0, 0.9])
def test_a_blank_before_the_edge_keeps_two_equal_tokens_apart(
    decoder: str, threshold: float
) -> None:
    config = GpuDecoderConfig(decoder=decoder, blank_threshold=threshold)  # type: ignore[arg-type]
    assert decode(spell([1, 0, 1]), config, [2]).best() == [1, 1]
    assert decode(spell([1, 1]), config, [1]).best() == [1]


def test_a_skipped_gap_does_not_write_a_token_twice() -> None:
    config = GpuDecoderConfig(blank_threshold=0.98)
    frames = [0, 1, 1, 0, 0, 2, 0, 0, 0, 2, 3, 3, 0]
    assert decode(spell(frames), config, [3, 4, 9]).best() == [1, 2, 2, 3]


@pytest.mark.numerics
@settings(max_examples=25)
@given(data=st.data(), num_streams=st.integers(1, 64), seed=st.integers(0, 2**31))
def test_streams_decoded_together_equal_streams_decoded_alone(
    data: st.DataObject, num_streams: int, seed: int
) -> None:
    config = GpuDecoderConfig(nbest=4, beam_size=6)
    decoder = GpuStreamingDecoder(config)
    states = [decoder.create_state(1, 9) for _ in range(num_streams)]
    heard: list[list[torch.Tensor]] = [[] for _ in states]
    for turn in range(data.draw(st.integers(1, 4))):
        chunk_NTV = random_log_probs(seed + turn, (num_streams, 5, 9), sharpness=2.0)
        ragged = st.lists(st.integers(0, 5), min_size=num_streams, max_size=num_streams)
        num_frames = data.draw(ragged)
        mask = [data.draw(st.booleans()) for _ in range(num_streams)]
        decoder.decode_chunk_batch(chunk_NTV, states, num_frames=num_frames, mask=mask)
        for pieces, chunk_TV, n, takes in zip(heard, chunk_NTV, num_frames, mask, strict=True):
            pieces.append(chunk_TV[: n if takes else 0])
    for state, pieces in zip(states, heard, strict=True):
        log_probs_TV = torch.cat(pieces)
        assert state.step == len(log_probs_TV)
        alone = decode(log_probs_TV, config)
        together = decoder.peek(state)
        assert together.token_log_probs == alone.token_log_probs
        bound = ctc_score_bound(len(log_probs_TV), alone.scores[0][-1])
        assert_same_results(together, alone, tolerance=bound)
        assert_equals_reference(together, log_probs_TV, config)


@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_times_and_log_probs_do_not_depend_on_the_cut(sharpness: float) -> None:
    config = GpuDecoderConfig(nbest=10)
    log_probs_TV = random_log_probs(3, (600, 40), sharpness=sharpness)
    whole = decode(log_probs_TV, config)
    assert whole == decode(log_probs_TV, config, range(1, 600))
    assert whole == decode(log_probs_TV, config, range(7, 600, 13))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), sharpness=st.floats(1.0, 6.0))
def test_times_are_the_first_frames_of_the_best_alignment(seed: int, sharpness: float) -> None:
    # All tokens are candidates and the beam holds every prefix that matters.
    config = GpuDecoderConfig(beam_size=40, token_candidates=5)
    log_probs_TV = random_log_probs(seed, (8, 5), sharpness=sharpness)
    result = decode(log_probs_TV, config, [3])
    _, times = best_alignment(log_probs_TV.double().numpy(), result.best())
    assert result.times[0][0] == times


def test_hypotheses_carry_rising_times_and_their_own_log_probs() -> None:
    config = GpuDecoderConfig(nbest=10)
    log_probs_TV = random_log_probs(5, (300, 20), sharpness=3.0)
    result = decode(log_probs_TV, config, range(16, 300, 16))
    assert result.scores[0] == sorted(result.scores[0], reverse=True)
    hypotheses = zip(result.tokens[0], result.times[0], result.token_log_probs[0], strict=True)
    for tokens, times, log_probs in hypotheses:
        assert len(tokens) == len(times) == len(log_probs)
        assert all(a < b for a, b in itertools.pairwise(times))
        assert 0 <= times[0] <= times[-1] < 300
        first = log_probs_TV[times, tokens].numpy()
        assert (np.array(log_probs) >= first).all()


def test_a_transcript_has_no_maximum_length() -> None:
    frames = [token for k in range(5000) for token in (1 + k % 3, 0)]
    log_probs_TV = spell(frames)
    result = decode(log_probs_TV, GpuDecoderConfig(), range(400, 10000, 400))
    assert result.best() == frames[::2]
    assert result.times[0][0] == list(range(0, 10000, 2))


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
def test_a_long_ambiguous_stream_equals_the_reference(sharpness: float) -> None:
    config = GpuDecoderConfig(nbest=10)
    log_probs_TV = random_log_probs(11, (1500, 50), sharpness=sharpness)
    result = decode(log_probs_TV, config, range(100, 1500, 100))
    assert_equals_reference(result, log_probs_TV, config)


def test_the_open_part_of_a_long_stream_stays_short() -> None:
    decoder = GpuStreamingDecoder(GpuDecoderConfig())
    state = decoder.create_state(1, 30)
    for turn in range(200):
        decoder.decode_chunk(random_log_probs(turn, (1, 64, 30), sharpness=5.0), state)
    history = decoder._search._history  # type: ignore[attr-defined]
    assert history.window_entries <= 256
    assert len(decoder.best_batch([state])[0].tokens) > 5_000


def test_settled_tokens_are_never_taken_back() -> None:
    decoder = GpuStreamingDecoder(GpuDecoderConfig(nbest=10))
    state = decoder.create_state(1, 30)
    settled: list[int] = []
    for turn in range(100):
        decoder.decode_chunk(random_log_probs(turn, (1, 16, 30), sharpness=4.0), state)
        for tokens in decoder.peek(state).tokens[0]:
            assert tokens[: len(settled)] == settled
        best = decoder.best_batch([state])[0]
        settled = list(best.tokens[: decoder.num_stable(state)])
        tail = decoder.best_batch([state], skips=[len(settled)])[0]
        assert (*settled, *tail.tokens) == best.tokens
        assert tail.times == best.times[len(settled) :]
        assert tail.token_log_probs == best.token_log_probs[len(settled) :]
    assert settled


def test_silence_adds_nothing() -> None:
    decoder = GpuStreamingDecoder(GpuDecoderConfig(nbest=10))
    state = decoder.create_state(1, 4)
    decoder.decode_chunk(spell([1, 0, 2])[None], state)
    silence_1TV = spell([0] * 500)[None]
    for _ in range(5):
        decoder.decode_chunk(silence_1TV, state)
    assert decoder.peek(state).best() == [1, 2]
    history = decoder._search._history  # type: ignore[attr-defined]
    assert history.window_entries == 32


def test_log_probs_of_nothing_keep_the_transcript() -> None:
    decoder = GpuStreamingDecoder(GpuDecoderConfig(nbest=3))
    state = decoder.create_state(1, 4)
    decoder.decode_chunk(spell([1, 0])[None], state)
    decoder.decode_chunk(torch.full((1, 200, 4), float("-inf")), state)
    assert decoder.peek(state).scores == [[float("-inf")]]
    history = decoder._search._history  # type: ignore[attr-defined]
    assert history.window_entries <= 256


def test_half_precision_log_probs_are_read_as_fp32() -> None:
    log_probs_TV = random_log_probs(1, (30, 12), sharpness=3.0).bfloat16()
    config = GpuDecoderConfig(nbest=10)
    assert_equals_reference(decode(log_probs_TV, config), log_probs_TV.float(), config)
