"""Scores of whole hypotheses by an attention decoder, or by one in each direction.

score(W) = sum of log P(w_i | w_1 .. w_(i-1), audio), end of sentence included. A decoder that reads
from right to left scores the reversed tokens in the same way; the two are weighed against each
other (Wu et al., "U2++: Unified Two-pass Bidirectional End-to-end Model", 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from oasr_backend.decoders.second_pass.base import FloatArray, Memory, Tokens
from oasr_backend.device import to_device
from oasr_backend.models.attention_decoder import AttentionDecoder

IntArray = npt.NDArray[np.int64]


class TeacherForcing(NamedTuple):
    """Hypotheses as a decoder reads them; on the host.

    Each is read as <sos> and its tokens, padded at the end; it must predict its tokens and <eos>.
    `target_M` holds what is to be predicted, hypothesis after hypothesis; `place_M` says where in
    the flattened (S, N, L) it stands, and `first_H` where each hypothesis begins in M.
    """

    input_SNL: IntArray
    target_M: IntArray
    place_M: IntArray
    first_H: IntArray

    @classmethod
    def of(cls, nbests: Sequence[Sequence[Tokens]], *, sos: int, eos: int) -> TeacherForcing:
        num_hypotheses = max(len(nbest) for nbest in nbests)
        longest = max(len(tokens) for tokens in chain(*nbests)) + 1
        input_SNL = np.full((len(nbests), num_hypotheses, longest), eos, dtype=np.int64)
        input_SNL[:, :, 0] = sos
        places: list[IntArray] = []
        for s, nbest in enumerate(nbests):
            for n, tokens in enumerate(nbest):
                input_SNL[s, n, 1 : len(tokens) + 1] = tokens
                begin = (s * num_hypotheses + n) * longest
                places.append(np.arange(begin, begin + len(tokens) + 1))
        target = [token for tokens in chain(*nbests) for token in (*tokens, eos)]
        return cls(
            input_SNL,
            target_M=np.array(target, dtype=np.int64),
            place_M=np.concatenate(places),
            first_H=np.cumsum([0, *map(len, places[:-1])]),
        )


class RescoringDecoder(nn.Module):
    """The attention decoder of a checkpoint. `right` reads from right to left, where there is one.

    `reverse_weight`: the share of `right` in a score, 0 to 1.
    """

    def __init__(
        self,
        left: AttentionDecoder,
        right: AttentionDecoder | None = None,
        *,
        sos: int,
        eos: int,
        reverse_weight: float = 0.0,
    ) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.sos, self.eos = sos, eos
        self.reverse_weight = reverse_weight if right is not None else 0.0

    @property
    def model_dim(self) -> int:
        return self.left.config.model_dim

    def prepare(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the weights to where they are used."""
        self.eval().requires_grad_(False)
        self.to(device, dtype)

    def forward(self, nbests: Sequence[Sequence[Tokens]], memory: Memory) -> list[FloatArray]:
        """The score of every hypothesis, stream by stream; streams may have few or many.

        Every stream has a frame and a hypothesis at least; a hypothesis may be empty. Waits for the
        device once a direction.
        """
        scores_H = _direction(self.left, nbests, memory, sos=self.sos, eos=self.eos)
        if self.right is not None:
            reverse = [[tokens[::-1] for tokens in nbest] for nbest in nbests]
            right_H = _direction(self.right, reverse, memory, sos=self.sos, eos=self.eos)
            scores_H = (1 - self.reverse_weight) * scores_H + self.reverse_weight * right_H
        return np.split(scores_H, np.cumsum([len(nbest) for nbest in nbests[:-1]]))


def _direction(
    decoder: AttentionDecoder,
    nbests: Sequence[Sequence[Tokens]],
    memory: Memory,
    *,
    sos: int,
    eos: int,
) -> FloatArray:
    teacher, device = TeacherForcing.of(nbests, sos=sos, eos=eos), memory.encoded_STD.device
    state_SNLD: Tensor = decoder(to_device(teacher.input_SNL, device), memory)
    place_M, target_M = to_device(np.stack([teacher.place_M, teacher.target_M]), device)
    log_prob_M = decoder.log_probs(state_SNLD.flatten(0, 2).index_select(0, place_M), target_M)
    # Added up on the host, in float64, so that no other hypothesis can change the sum.
    sums_H: FloatArray = np.add.reduceat(log_prob_M.cpu().double().numpy(), teacher.first_H)
    return sums_H
