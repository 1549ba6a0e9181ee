from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.kernels import best_tokens
from tests.reference.ctc import greedy
from tests.rounding import log_softmax_bound

pytestmark = pytest.mark.numerics

GOLDEN = Path(__file__).parent / "golden"
CONFIG = GpuDecoderConfig(decoder="greedy")
#: The tests' log-probs are normalised, and the decoder does it again: at most 7 units above -20.
NORMALISED_TWICE = 2 * log_softmax_bound(7, 20.0)


def spell(frames: list[int], vocab_size: int = 4) -> torch.Tensor:
    logits = torch.nn.functional.one_hot(torch.tensor(frames), vocab_size) * 9.0
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("folder", ["wenet_small", "wenet_bn_k31"])
@pytest.mark.parametrize("chunk_frames", [1, 5, 16, 1000])
def test_greedy_equals_wenets_on_the_goldens(folder: str, chunk_frames: int) -> None:
    golden = np.load(GOLDEN / folder / "expected.npz")
    for key in [k for k in golden.files if k.endswith(".greedy")]:
        decoder = GpuStreamingDecoder(CONFIG)
        log_probs_TV = torch.from_numpy(golden[key.replace("greedy", "logp")])
        decoder.init_stream(1, log_probs_TV.shape[1])
        for chunk_TV in log_probs_TV.split(chunk_frames):
            decoder.decode_chunk(chunk_TV[None])
        assert decoder.finalize_stream().best() == golden[key].tolist()


@settings(max_examples=30)
@given(data=st.data(), num_streams=st.integers(1, 12), num_chunks=st.integers(1, 5))
def test_ragged_batches_equal_the_reference(
    data: st.DataObject, num_streams: int, num_chunks: int
) -> None:
    decoder = GpuStreamingDecoder(CONFIG)
    states = [decoder.create_state(1, 4) for _ in range(num_streams)]
    heard: list[list[torch.Tensor]] = [[] for _ in states]
    for _ in range(num_chunks):
        paths = st.lists(st.integers(0, 3), min_size=4, max_size=4)
        chunk_NTV = torch.stack([spell(data.draw(paths)) for _ in states])
        num_frames = [data.draw(st.integers(0, 4)) for _ in states]
        decoder.decode_chunk_batch(chunk_NTV, states, num_frames=num_frames)
        for pieces, chunk_TV, n in zip(heard, chunk_NTV, num_frames, strict=True):
            pieces.append(chunk_TV[:n])
    for state, pieces in zip(states, heard, strict=True):
        log_probs_TV = torch.cat(pieces).numpy()
        best = decoder.best_batch([state])[0]
        assert (list(best.tokens), list(best.times)) == greedy(log_probs_TV)
        peaks_T = log_probs_TV.max(1).astype(np.float64) if len(log_probs_TV) else np.zeros(0)
        bound = len(peaks_T) * NORMALISED_TWICE
        assert best.score == pytest.approx(float(peaks_T.sum()), abs=bound)


def test_a_tokens_log_prob_is_the_best_of_its_frames_across_chunks() -> None:
    log_probs_TV = spell([0, 1, 1, 1, 0, 1])
    log_probs_TV[3] = torch.log_softmax(torch.tensor([0.0, 20.0, 0.0, 0.0]), dim=-1)
    decoder = GpuStreamingDecoder(CONFIG)
    decoder.init_stream(1, 4)
    for chunk_TV in log_probs_TV.split(2):
        decoder.decode_chunk(chunk_TV[None])
    result = decoder.peek()
    assert result.times == [[[1, 5]]]
    peaks = [float(log_probs_TV[3, 1]), float(log_probs_TV[5, 1])]
    assert result.token_log_probs[0][0] == pytest.approx(peaks, abs=NORMALISED_TWICE)


def test_the_device_part_gives_ids_and_log_probs_in_one_tensor() -> None:
    log_probs_NTV = torch.log_softmax(torch.randn(2, 5, 7), dim=-1)
    packed = best_tokens(log_probs_NTV)
    best, ids = log_probs_NTV.max(-1)
    assert torch.equal(packed[0].long(), ids)
    assert float((packed[1].view(torch.float32) - best).abs().max()) <= NORMALISED_TWICE
