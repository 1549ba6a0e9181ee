from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oasr_backend.cache.ctc_state import CtcStateCacheManager
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.errors import StreamStateError, UnknownStreamError
from tests.rounding import ctc_score_bound
from tests.same_results import assert_same_results

VOCAB = 6
#: Twenty-five steps of three frames, each above -20.
NARROW = ctc_score_bound(75, 1500.0)


def log_probs(seed: int, *shape: int) -> torch.Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return torch.log_softmax(logits, dim=-1)


def test_a_handle_speaks_like_a_stand_alone_decoder() -> None:
    config = GpuDecoderConfig(nbest=3)
    manager = CtcStateCacheManager(config)
    manager.allocate_stream(42, batch=1, vocab_size=VOCAB)
    alone = GpuStreamingDecoder(config)
    alone.init_stream(1, VOCAB)
    for seed in range(4):
        manager.get_decoder(42).decode_chunk(log_probs(seed, 1, 5, VOCAB))
        alone.decode_chunk(log_probs(seed, 1, 5, VOCAB))
        assert manager.get_decoder(42).peek() == alone.peek()
    handle = manager.get_decoder(42)
    assert handle.finalize_stream() == alone.finalize_stream()
    assert (handle.step, handle.config) == (20, config)


def test_the_default_is_prefix_beam_ten() -> None:
    config = CtcStateCacheManager().decoder.config
    assert (config.decoder, config.beam_size) == ("prefix_beam", 10)


def test_a_freed_state_is_used_again_last_first() -> None:
    manager = CtcStateCacheManager()
    for stream_id in "abc":
        manager.allocate_stream(stream_id, vocab_size=VOCAB)
    first, last = manager.get_states("ac")
    capacity = manager.decoder._rows.capacity
    manager.free_stream("a")
    manager.free_stream("c")
    assert manager.num_pooled == 2
    manager.allocate_stream("d", vocab_size=VOCAB)
    manager.allocate_stream("e", vocab_size=VOCAB)
    assert manager.get_states("de") == [last, first]
    assert manager.num_pooled == 0
    assert manager.decoder._rows.capacity == capacity
    manager.check_integrity()


def test_a_reused_state_knows_nothing_of_its_last_stream() -> None:
    manager = CtcStateCacheManager()
    manager.allocate_stream(1, vocab_size=VOCAB)
    manager.get_decoder(1).decode_chunk(log_probs(0, 1, 20, VOCAB))
    expected = manager.get_decoder(1).peek()
    manager.free_stream(1)
    manager.allocate_stream(2, vocab_size=VOCAB)
    assert manager.get_decoder(2).peek().best() == []
    manager.get_decoder(2).decode_chunk(log_probs(0, 1, 20, VOCAB))
    assert manager.get_decoder(2).peek() == expected


def test_a_pooled_state_serves_another_batch_and_vocabulary() -> None:
    manager = CtcStateCacheManager()
    manager.allocate_stream(1, vocab_size=VOCAB)
    manager.free_stream(1)
    manager.allocate_stream(2, batch=3, vocab_size=9)
    manager.get_decoder(2).decode_chunk(log_probs(0, 3, 4, 9))
    manager.check_integrity()


def test_resetting_a_stream_starts_it_again() -> None:
    manager = CtcStateCacheManager()
    manager.allocate_stream(1, vocab_size=VOCAB)
    manager.get_decoder(1).decode_chunk(log_probs(0, 1, 20, VOCAB))
    manager.reset_stream(1)
    assert manager.get_decoder(1).peek().best() == []
    assert manager.get_decoder(1).step == 0


def test_a_second_allocation_of_an_id_is_refused() -> None:
    manager = CtcStateCacheManager()
    manager.allocate_stream(42, vocab_size=VOCAB)
    manager.allocate_stream("42", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="already allocated") as refusal:
        manager.allocate_stream(42, vocab_size=VOCAB)
    assert isinstance(refusal.value, StreamStateError)
    manager.check_integrity()


def test_a_refused_allocation_changes_nothing() -> None:
    manager = CtcStateCacheManager()
    manager.allocate_stream(1, vocab_size=VOCAB)
    manager.free_stream(1)
    for options in ({}, {"vocab_size": 0}, {"vocab_size": VOCAB, "batch": 0}):
        with pytest.raises(StreamStateError):
            manager.allocate_stream(2, **options)
        assert (manager.num_pooled, manager.num_streams) == (1, 0)
        manager.check_integrity()


def test_an_unknown_id_is_a_key_error() -> None:
    manager = CtcStateCacheManager()
    for use in (manager.free_stream, manager.get_decoder, manager.reset_stream):
        with pytest.raises(KeyError) as refusal:
            use(7)
        assert isinstance(refusal.value, UnknownStreamError)
    manager.allocate_stream(1, vocab_size=VOCAB)
    with pytest.raises(UnknownStreamError, match="7"):
        manager.get_states([1, 7])


class Streams(RuleBasedStateMachine):
    """Random opens, chunks, resets and frees against one stand-alone decoder per stream."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = CtcStateCacheManager(GpuDecoderConfig(beam_size=3, nbest=3))
        self.alone: dict[int, GpuStreamingDecoder] = {}

    @rule(stream_id=st.integers(0, 4))
    def open(self, stream_id: int) -> None:
        if stream_id in self.alone:
            return
        self.manager.allocate_stream(stream_id, vocab_size=VOCAB)
        self.alone[stream_id] = GpuStreamingDecoder(self.manager.decoder.config)
        self.alone[stream_id].init_stream(1, VOCAB)

    @rule(seed=st.integers(0, 99), data=st.data())
    def decode(self, seed: int, data: st.DataObject) -> None:
        ids = [i for i in self.alone if data.draw(st.booleans())]
        chunk_NTV = log_probs(seed, len(ids), 3, VOCAB)
        num_frames = [data.draw(st.integers(0, 3)) for _ in ids]
        states = self.manager.get_states(ids)
        self.manager.decoder.decode_chunk_batch(chunk_NTV, states, num_frames=num_frames)
        for stream_id, chunk_TV, n in zip(ids, chunk_NTV, num_frames, strict=True):
            self.alone[stream_id].decode_chunk(chunk_TV[None, :n])

    @rule(stream_id=st.integers(0, 4), free=st.booleans())
    def end(self, stream_id: int, free: bool) -> None:
        if stream_id not in self.alone:
            return
        if free:
            self.manager.free_stream(stream_id)
            del self.alone[stream_id]
        else:
            self.manager.reset_stream(stream_id)
            self.alone[stream_id].init_stream(1, VOCAB)

    @invariant()
    def every_stream_reads_as_if_alone(self) -> None:
        self.manager.check_integrity()
        for stream_id, decoder in self.alone.items():
            ours, alone = self.manager.get_decoder(stream_id).peek(), decoder.peek()
            assert_same_results(ours, alone, tolerance=NARROW)


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=20, stateful_step_count=25)


def test_log_probs_on_another_device_than_the_states_are_refused_by_name() -> None:
    manager = CtcStateCacheManager(GpuDecoderConfig(beam_size=3), device="cpu")
    manager.allocate_stream(1, vocab_size=5)
    with pytest.raises(StreamStateError, match="on meta, the decoder's states on cpu"):
        manager.get_decoder(1).decode_chunk(torch.zeros(1, 4, 5, device="meta"))
