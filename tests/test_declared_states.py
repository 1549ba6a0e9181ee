"""An encoder that keeps everything in declared states, served by the real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oasr_backend.cache import StreamStateSpec
from oasr_backend.checkpoints import Checkpoint
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import CTC_SEARCHES
from oasr_backend.errors import ConfigError
from oasr_backend.features import KaldiFrontend, LogMelFilterbank
from oasr_backend.models import (
    AcousticModel,
    CtcHead,
    EncoderCaches,
    EncoderSpec,
    StreamingEncoder,
)
from oasr_backend.streaming.assemble import assemble
from oasr_backend.streaming.engine import Engine
from oasr_backend.text.tokenizer import load_tokenizer
from oasr_backend.types import Samples
from tests.conftest import DEMO_DIR
from tests.engine_helpers import ask, chunk, noise

DIM = 24


class RecurrentEncoder(StreamingEncoder):
    """A leaky memory over pairs of feature frames; no attention, no convolution."""

    spec = EncoderSpec(
        model_dim=DIM,
        subsampling_rate=2,
        right_context_frames=1,
        # The slot axis may stand anywhere.
        state_specs=(StreamStateSpec("memory", (2, DIM), slot_axis=1),),
    )

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Linear(2 * 80, DIM)

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        x_BTD = torch.tanh(self.stack(features_BWF.unflatten(1, (-1, 2)).flatten(2)))
        memory_2BD = caches.states["memory"].gather()
        slow_BD, fast_BD = memory_2BD.unbind()
        frames = []
        for x_BD in x_BTD.unbind(1):
            slow_BD, fast_BD = 0.95 * slow_BD + x_BD, 0.5 * fast_BD + x_BD
            frames.append(fast_BD - 0.05 * slow_BD)
        caches.states["memory"].scatter(torch.stack((slow_BD, fast_BD)))
        return torch.stack(frames, dim=1)


def recurrent_engine(**settings: Any) -> Engine:
    torch.manual_seed(0)
    frontend = KaldiFrontend(LogMelFilterbank())
    model = AcousticModel(frontend, RecurrentEncoder(), [CtcHead(DIM, 258, blank_id=0)])
    tokenizer = load_tokenizer(DEMO_DIR / "units.txt", None)
    config = ServingConfig.of(**{"max_streams": 3, **settings})
    checkpoint = Checkpoint(model, tokenizer, CTC_SEARCHES)
    return assemble(checkpoint, config, device=torch.device("cpu"))


def whole_text(samples_S: Samples) -> str:
    (result,) = ask(recurrent_engine(), chunk("whole", samples_S, flags="SE"))
    assert result.error is None
    return result.text


def test_the_state_carries_what_was_heard_from_step_to_step() -> None:
    audio = [noise(seed, seconds=2.5) for seed in range(3)]
    expected = [whole_text(samples_S) for samples_S in audio]
    assert len(set(expected)) == 3
    engine = recurrent_engine()
    for start in range(0, 40_000, 7_000):
        flags = ("S" if start == 0 else "") + ("E" if start + 7_000 >= 40_000 else "")
        pieces = [samples_S[start : min(start + 7_000, 40_000)] for samples_S in audio]
        results = ask(engine, *(chunk(i, piece, flags=flags) for i, piece in enumerate(pieces)))
    assert [result.text for result in results] == expected
    engine.check_integrity()


def test_a_slot_that_comes_again_remembers_nothing() -> None:
    engine = recurrent_engine(max_streams=1)
    first, second = noise(5, seconds=1.5), noise(6, seconds=1.5)
    ask(engine, chunk("a", first, flags="SE"))
    (again,) = ask(engine, chunk("b", second, flags="SE"))
    assert again.text == whole_text(second)


def test_a_step_that_runs_out_of_memory_late_is_heard_once() -> None:
    audio = [noise(seed, seconds=2.5) for seed in range(3)]
    expected = [whole_text(samples_S) for samples_S in audio]
    engine = recurrent_engine()
    ctc, failures = engine.parts.model.heads["ctc"], iter([True, False, True])

    def out_of_memory_at_times(_module: nn.Module, _args: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError

    ctc.register_forward_pre_hook(out_of_memory_at_times)
    results = ask(engine, *(chunk(i, one, flags="SE") for i, one in enumerate(audio)))
    assert [result.text for result in results] == expected
    assert next(failures, None) is None


def test_a_persistent_state_that_no_request_can_set_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompted = replace(
        RecurrentEncoder.spec, state_specs=(StreamStateSpec("prompt", (3,), persistent=True),)
    )
    monkeypatch.setattr(RecurrentEncoder, "spec", prompted)
    with pytest.raises(ConfigError, match=r"'prompt' as persistent.*persistent=False"):
        recurrent_engine()
