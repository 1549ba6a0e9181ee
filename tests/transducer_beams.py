"""Beam searches of a transducer by themselves: a network, frames, and two ways to decode them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oasr_backend.decoders.base import SearchSettings
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.chunk import ChunkRows
from oasr_backend.decoders.transducer.beam.search import TransducerBeamSearch
from oasr_backend.types import Hypothesis
from tests.ngrams import DEVICE
from tests.reference.transducer_beam import PlainPath, PlainTransducerBeam, Tokens
from tests.rounding import UNIT64, gamma


class PlainNetwork(nn.Module):
    """Implements TransducerNetwork in float64, without a product of matrices.

    So a row's logits do not depend on how many there are, and no two are equal.
    """

    table_CVJ: Tensor

    def __init__(self, seed: int, vocab: int, context: int, *, sharpness: float = 3.0) -> None:
        super().__init__()
        self.context_size, self.blank_id, self.blank_penalty = context, seed % 2, 0.0
        self.sharpness = sharpness
        generator = torch.Generator().manual_seed(seed)
        table_CVJ = torch.randn((context, vocab + 1, vocab), generator=generator)
        table_CVJ[:, 0] = 0.0
        self.register_buffer("table_CVJ", table_CVJ.double())

    @property
    def start_context(self) -> tuple[int, ...]:
        return (*(-1,) * (self.context_size - 1), self.blank_id)

    def predict(self, context_NC: Tensor) -> Tensor:
        return sum(self.table_CVJ[c][context_NC[:, c] + 1] for c in range(self.context_size))

    def logits(self, frames_NJ: Tensor, predicted_NJ: Tensor) -> Tensor:
        return torch.tanh(frames_NJ + predicted_NJ) * self.sharpness


def frames_of(seed: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).double().to(DEVICE)


def new_search(
    network: nn.Module, beam: int, num_rows: int = 1, *, scorers: Sequence[PrefixScorer] = ()
) -> TransducerBeamSearch:
    made = SearchSettings(device=DEVICE, beam_size=beam, token_candidates=4, scorers=tuple(scorers))
    search = TransducerBeamSearch(network.to(DEVICE), made)  # type: ignore[arg-type]
    search.grow(num_rows)
    search.reset_rows(range(num_rows))
    return search


def decode(
    search: TransducerBeamSearch,
    frames_NTJ: Tensor,
    start: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    num_frames: Sequence[int] | None = None,
) -> None:
    rows = range(len(frames_NTJ)) if rows is None else rows
    counts = [frames_NTJ.shape[1]] * len(frames_NTJ) if num_frames is None else num_frames
    search.begin(frames_NTJ, ChunkRows(np.array(rows), np.array(counts), np.array(start)))()


def decoded(
    network: nn.Module, frames_TJ: Tensor, beam: int, cuts: Sequence[int] = ()
) -> list[Hypothesis]:
    search, heard = new_search(network, beam), 0
    for piece_TJ in torch.tensor_split(frames_TJ, sorted(cuts)):
        if len(piece_TJ):
            decode(search, piece_TJ[None], [heard])
        heard += len(piece_TJ)
    return search.hypotheses(0, beam)


def plain(
    network: nn.Module, frames_TJ: Tensor, beam: int, **options: object
) -> PlainTransducerBeam:
    search = PlainTransducerBeam(network.to(DEVICE), beam, **options)  # type: ignore[arg-type]
    for frame_J in frames_TJ:
        search.frame(frame_J)
    return search


def assert_equal(
    found: Sequence[Hypothesis], expected: Sequence[tuple[Tokens, PlainPath]], num_frames: int
) -> None:
    assert [one.tokens for one in found] == [tokens for tokens, _ in expected]
    for one, (_, path) in zip(found, expected, strict=True):
        bound = 2 * gamma(20 * num_frames + 20, UNIT64) * (abs(path.score) + 10 * num_frames + 1)
        assert abs(one.score - path.score) <= bound
        assert one.times == path.times
        assert one.token_log_probs == pytest.approx(path.log_probs, rel=1e-6)
