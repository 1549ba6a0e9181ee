"""A group of decoders by itself: no cache, no model, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oasr_backend.decoders.base import CTC_SEARCHES, SearchKind, SearchSettings
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.decoders.second_pass.base import FloatArray, Memory, NoDecoder, SecondPass, Tokens
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.text.tokenizer import UnitTokenizer

CPU = torch.device("cpu")
FRAMES, DIM = 4, 2
CTC_WEIGHT = 0.5
SYMBOLS = ["<blank>", "\u2581A", "B", "\u2581C", "D", "\u2581E"]
TOKENIZER = UnitTokenizer(SYMBOLS)
VOCAB = len(SYMBOLS)
SETTINGS = SearchSettings(device=CPU, token_candidates=VOCAB)


def weight_of(tokens: Tokens, heard: float) -> float:
    """A score that has nothing to do with the beam's, and never lies close to another one."""
    place = sum(token * 7**n for n, token in enumerate(tokens)) % 10_007
    return 10.0 * place + heard


class PlainScorer:
    """Weighs a hypothesis by its tokens and by the sum of all that was heard."""

    def __call__(self, nbests: Sequence[Sequence[Tokens]], memory: Memory) -> list[FloatArray]:
        assert not memory.encoded_STD[~memory.is_real_ST].any()
        heard_S = memory.encoded_STD.double().sum((1, 2)).tolist()
        return [
            np.array([weight_of(tokens, heard) for tokens in nbest])
            for nbest, heard in zip(nbests, heard_S, strict=True)
        ]


def plain_rescorer() -> Rescorer:
    frames = EncodedFrames(
        block_frames=FRAMES, model_dim=DIM, max_frames=1000, device=CPU, dtype=torch.float32
    )
    return Rescorer(PlainScorer(), frames, ctc_weight=CTC_WEIGHT)


def new_group(
    *,
    searches: Mapping[str, SearchKind] = CTC_SEARCHES,
    second_pass: SecondPass | None = None,
    language_model: NgramScorer | None = None,
) -> DecoderGroup:
    return DecoderGroup(
        searches,
        SETTINGS,
        TOKENIZER,
        vocab_size=VOCAB,
        second_pass=second_pass or NoDecoder(),
        language_model=language_model,
    )


def logits(seed: int, rows: int) -> Tensor:
    return torch.randn((rows, FRAMES, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def decode(group: DecoderGroup, seed: int, slots: Sequence[int], num_frames: int = FRAMES) -> None:
    """One step of these slots, from begin to finish."""
    frames_B = np.full(len(slots), num_frames)
    encoded_BTD = torch.ones((len(slots), FRAMES, DIM))
    heads = {"ctc": logits(seed, len(slots))}
    group.begin(np.array(slots), frames_B, heads, encoded_BTD)()
