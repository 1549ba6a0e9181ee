from __future__ import annotations

from typing import Any

import pytest
import torch

from oasr_backend import decoders
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder, greedy
from oasr_backend.decoders.prefix_beam import search as prefix_beam
from oasr_backend.decoders.readback import begin_copy
from oasr_backend.errors import ConfigError, DecoderStateError, StreamStateError
from tests.same_results import assert_same_results

DECODERS = ["greedy", "prefix_beam"]


def log_probs(seed: int, *shape: int) -> torch.Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.log_softmax(logits, dim=-1)


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> GpuStreamingDecoder:
    return GpuStreamingDecoder(GpuDecoderConfig(decoder=request.param))


def test_the_public_names_are_sorted() -> None:
    assert decoders.__all__ == sorted(decoders.__all__)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"decoder": "beam"}, "greedy, prefix_beam"),
        ({"beam_size": 0}, "beam_size 0"),
        ({"token_candidates": 0}, "token_candidates 0"),
        ({"blank_id": -1}, "blank_id -1"),
        ({"blank_threshold": 0.0}, "blank_threshold 0.0"),
        ({"blank_threshold": 1.5}, "blank_threshold 1.5"),
        ({"nbest": 0}, "nbest 0"),
        ({"nbest": 11}, "nbest 11 is not in 1..10"),
        ({"decoder": "greedy", "nbest": 2}, "nbest 2 is not in 1..1"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GpuDecoderConfig(**options)


def test_a_chunk_without_frames_changes_nothing(decoder: GpuStreamingDecoder) -> None:
    decoder.init_stream(1, 8)
    decoder.decode_chunk(log_probs(0, 1, 6, 8))
    before = decoder.peek()
    decoder.decode_chunk(log_probs(0, 1, 0, 8))
    assert decoder.peek() == before


@pytest.mark.numerics
def test_masked_rows_and_frames_leave_the_state_unchanged(decoder: GpuStreamingDecoder) -> None:
    states = [decoder.create_state(1, 8) for _ in range(3)]
    decoder.decode_chunk_batch(log_probs(0, 3, 6, 8), states)
    before = decoder.peek_batch(states)
    chunk = torch.full((3, 6, 8), float("nan"))
    decoder.decode_chunk_batch(chunk, states, mask=[False] * 3)
    decoder.decode_chunk_batch(chunk, states, num_frames=[0, 0, 0])
    chunk[1] = log_probs(1, 6, 8)
    decoder.decode_chunk_batch(chunk, states, mask=torch.tensor([False, True, False]))
    chunk[1, 4:] = float("nan")
    after = decoder.peek_batch(states)
    assert (after[0], after[2]) == (before[0], before[2])
    alone = decoder.create_state(1, 8)
    decoder.decode_chunk(log_probs(0, 3, 6, 8)[1:2], alone)
    decoder.decode_chunk(log_probs(1, 6, 8)[None], alone)
    assert_same_results(after[1], decoder.peek(alone))


@pytest.mark.numerics
def test_nan_past_a_rows_frames_reaches_no_result(decoder: GpuStreamingDecoder) -> None:
    states = [decoder.create_state(1, 8) for _ in range(3)]
    chunk = log_probs(2, 3, 6, 8)
    clean = chunk.clone()
    chunk[0, 2:] = float("nan")
    chunk[2] = float("nan")
    decoder.decode_chunk_batch(chunk, states, num_frames=[2, 6, 0])
    for row, frames in ((0, 2), (1, 6)):
        alone = decoder.create_state(1, 8)
        decoder.decode_chunk(clean[row : row + 1, :frames], alone)
        assert_same_results(decoder.peek(states[row]), decoder.peek(alone))


def test_a_state_with_a_batch_decodes_every_entry(decoder: GpuStreamingDecoder) -> None:
    chunk = log_probs(3, 4, 9, 8)
    decoder.init_stream(4, 8)
    decoder.decode_chunk(chunk)
    result = decoder.finalize_stream()
    states = [decoder.create_state(1, 8) for _ in range(4)]
    decoder.decode_chunk_batch(chunk, states)
    assert result.tokens == [decoder.peek(state).tokens[0] for state in states]


def test_finalizing_twice_gives_the_same_and_decoding_may_go_on(
    decoder: GpuStreamingDecoder,
) -> None:
    decoder.init_stream(1, 8)
    decoder.decode_chunk(log_probs(4, 1, 9, 8))
    first = decoder.finalize_stream()
    assert decoder.finalize_stream() == first == decoder.peek()
    decoder.decode_chunk(log_probs(5, 1, 9, 8))
    other = GpuStreamingDecoder(decoder.config)
    other.init_stream(1, 8)
    other.decode_chunk(torch.cat((log_probs(4, 1, 9, 8), log_probs(5, 1, 9, 8)), dim=1))
    assert other.finalize_stream().tokens == decoder.finalize_stream().tokens


def test_best_batch_gives_what_peek_gives(decoder: GpuStreamingDecoder) -> None:
    states = [decoder.create_state(1, 8) for _ in range(5)]
    decoder.decode_chunk_batch(log_probs(6, 5, 30, 8), states)
    for best, result in zip(decoder.best_batch(states), decoder.peek_batch(states), strict=True):
        assert list(best.tokens) == result.best()
        assert list(best.times) == result.times[0][0]
        assert best.score == result.scores[0][0]


def test_a_released_row_is_used_again_and_starts_clean(decoder: GpuStreamingDecoder) -> None:
    state = decoder.create_state(2, 8)
    rows = set(state.rows)
    decoder.decode_chunk(log_probs(7, 2, 9, 8), state)
    decoder.release_state(state)
    decoder.check_integrity()
    again = decoder.create_state(2, 8)
    assert set(again.rows) == rows
    assert decoder.peek(again).tokens == [[[]], [[]]]
    assert again.step == 0


def test_reset_with_another_batch_takes_other_rows(decoder: GpuStreamingDecoder) -> None:
    state = decoder.create_state(1, 8)
    decoder.reset_state(state, 3, 12)
    decoder.check_integrity()
    assert (state.batch, state.vocab_size) == (3, 12)
    decoder.decode_chunk(log_probs(8, 3, 4, 12), state)


def test_seventy_streams_keep_their_transcripts_while_the_pool_grows(
    decoder: GpuStreamingDecoder,
) -> None:
    chunk = log_probs(9, 1, 4, 8)
    states = []
    for _ in range(70):
        states.append(decoder.create_state(1, 8))
        decoder.decode_chunk(chunk, states[-1])
        decoder.check_integrity()
    expected = decoder.peek(states[0])
    assert all(decoder.peek(state) == expected for state in states)


def test_calls_without_a_stream_are_refused(decoder: GpuStreamingDecoder) -> None:
    with pytest.raises(RuntimeError, match="init_stream"):
        decoder.decode_chunk(log_probs(0, 1, 2, 8))
    with pytest.raises(DecoderStateError, match="init_stream"):
        decoder.finalize_stream()


def test_a_released_state_is_refused(decoder: GpuStreamingDecoder) -> None:
    state = decoder.create_state(1, 8)
    decoder.release_state(state)
    for use in (decoder.peek, decoder.release_state):
        with pytest.raises(DecoderStateError, match="released"):
            use(state)
    decoder.check_integrity()


def test_wrong_shapes_are_refused_before_anything_changes(decoder: GpuStreamingDecoder) -> None:
    states = [decoder.create_state(1, 8) for _ in range(2)]
    other_vocab = decoder.create_state(1, 9)
    stranger = GpuStreamingDecoder(decoder.config).create_state(1, 8)
    chunk = log_probs(0, 2, 4, 8)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"\(3, 4, 8\)", (log_probs(0, 3, 4, 8), states), {}),
        (r"\(2, 4, 9\)", (log_probs(0, 2, 4, 9), states), {}),
        (r"\(4, 8\)", (log_probs(0, 4, 8), states), {}),
        ("different", (chunk, [states[0], other_vocab]), {}),
        ("twice", (chunk, [states[0], states[0]]), {}),
        ("another decoder", (chunk, [states[0], stranger]), {}),
        (r"mask has shape \(3,\)", (chunk, states), {"mask": [True] * 3}),
        (r"mask has shape \(2, 1\)", (chunk, states), {"mask": torch.ones(2, 1)}),
        ("1 entries for 2", (chunk, states), {"num_frames": [4]}),
        (r"\[5\] are not in 0..4", (chunk, states), {"num_frames": [5, 1]}),
    ]
    for message, args, options in refused:
        with pytest.raises(StreamStateError, match=message):
            decoder.decode_chunk_batch(*args, **options)
    assert [state.step for state in states] == [0, 0]
    assert all(result.tokens == [[[]]] for result in decoder.peek_batch(states))


def test_impossible_geometry_is_refused() -> None:
    decoder = GpuStreamingDecoder(GpuDecoderConfig(blank_id=5))
    with pytest.raises(StreamStateError, match="batch 0"):
        decoder.create_state(0, 8)
    with pytest.raises(StreamStateError, match="blank_id 5"):
        decoder.create_state(1, 5)


def test_no_states_and_no_rows_is_a_no_op(decoder: GpuStreamingDecoder) -> None:
    decoder.decode_chunk_batch(log_probs(0, 0, 4, 8), [])


def test_chunks_begun_ahead_of_each_other_are_taken_in_in_order(
    decoder: GpuStreamingDecoder,
) -> None:
    first, second = log_probs(1, 2, 9, 8), log_probs(2, 3, 7, 8)
    states = [decoder.create_state(1, 8) for _ in range(5)]
    finish_first = decoder.begin_chunk_batch(first, states[:2])
    finish_second = decoder.begin_chunk_batch(second, states[2:])
    assert [len(best.tokens) for best in decoder.best_batch(states)] == [0] * 5
    finish_first()
    assert not any(best.tokens for best in decoder.best_batch(states[2:]))
    finish_second()
    together = [decoder.create_state(1, 8) for _ in range(5)]
    decoder.decode_chunk_batch(first, together[:2])
    decoder.decode_chunk_batch(second, together[2:])
    assert decoder.best_batch(states) == decoder.best_batch(together)
    assert all(best.tokens for best in decoder.best_batch(states))


def test_a_chunk_costs_one_copy_to_the_host(
    decoder: GpuStreamingDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [decoder.create_state(1, 8) for _ in range(6)]
    copies = []
    for module in (greedy, prefix_beam):
        monkeypatch.setattr(
            module, "begin_copy", lambda x: (copies.append(x.shape), begin_copy(x))[1]
        )
    for name in ("cpu", "item", "tolist", "__bool__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, _refuse)
    decoder.decode_chunk_batch(log_probs(1, 6, 9, 8), states, num_frames=[9, 3, 0, 9, 1, 2])
    decoder.best_batch(states)
    assert len(copies) == 1


def _refuse(*_: object) -> None:
    raise AssertionError("a tensor is read on the host")
