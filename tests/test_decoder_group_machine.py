"""A group of decoders over random lives of streams, against one decoder for each stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.decoders.arrays import IntArray
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.decoders.second_pass.final_order import Weighing
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis
from tests.decoder_groups import (
    CPU,
    CTC_WEIGHT,
    DIM,
    FRAMES,
    TOKENIZER,
    VOCAB,
    logits,
    new_group,
    plain_rescorer,
    weight_of,
)
from tests.same_results import assert_same_results

#: Rows grow when a slot is past them: to 32, then to 64, then to 128.
SLOTS = [0, 1, 2, 31, 32, 70]
BEAM = "prefix_beam"
OPTIONS = [
    StreamOptions(decoder="greedy"),
    StreamOptions(decoder=BEAM, beam_size=3),
    StreamOptions(decoder=BEAM, beam_size=4),
    StreamOptions(decoder=BEAM, beam_size=4, rescoring=True),
    StreamOptions(decoder=BEAM, beam_size=3, hotwords="ab|c", hotword_boost=2.0),
    StreamOptions(decoder=BEAM, beam_size=3, hotwords="eb", hotword_boost=1.0, rescoring=True),
]


def decoder_alone(options: StreamOptions) -> GpuStreamingDecoder:
    beam_size = options.beam_size if options.decoder == BEAM else 1
    config = GpuDecoderConfig(
        decoder=options.decoder, beam_size=beam_size, token_candidates=VOCAB, nbest=beam_size
    )
    scorers: list[PrefixScorer] = []
    if options.phrases:
        spelling = HotwordSpelling(TOKENIZER, VOCAB)
        hotwords = spelling.scorer(CPU)
        hotwords.assign([0], "phrases", spelling.graph(options))
        scorers.append(hotwords)
    decoder = GpuStreamingDecoder(config, scorers=scorers)
    decoder.init_stream(1, VOCAB)
    return decoder


@dataclass
class Life:
    """One stream as it should be. `final` is None as long as the beam's order stands."""

    options: StreamOptions
    alone: GpuStreamingDecoder
    heard: float = 0.0
    is_ended: bool = False
    final: list[Hypothesis] | None = None

    @property
    def beam(self) -> list[Hypothesis]:
        assert self.alone._own_state is not None
        return self.alone.nbest(self.alone._own_state, 10)

    @property
    def nbest(self) -> list[Hypothesis]:
        return self.beam if self.final is None else self.final

    @property
    def num_stable(self) -> int:
        assert self.alone._own_state is not None
        return self.alone.num_stable(self.alone._own_state)

    def rescored(self) -> list[Hypothesis]:
        scored = [
            one._replace(score=weight_of(one.tokens, self.heard) + CTC_WEIGHT * one.score)
            for one in self.beam
        ]
        return sorted(scored, key=lambda one: one.score, reverse=True)


class Groups(RuleBasedStateMachine):
    """Slots are used again, kinds share steps, and outcomes come late."""

    def __init__(self) -> None:
        super().__init__()
        self.group = new_group(second_pass=plain_rescorer())
        self.lives: dict[int, Life] = {}
        self.begun: list[Callable[[], None]] = []
        self.weighed: list[tuple[Weighing, dict[int, Life]]] = []
        self.is_stepping: set[int] = set()

    @rule(slot=st.sampled_from(SLOTS), options=st.sampled_from(OPTIONS))
    def open(self, slot: int, options: StreamOptions) -> None:
        if slot not in self.lives:
            self.group.open(slot, options)
            self.lives[slot] = Life(options, decoder_alone(options))

    @rule(slot=st.sampled_from(SLOTS))
    def close(self, slot: int) -> None:
        """Never within a step, like the engine."""
        if slot in self.lives and slot not in self.is_stepping:
            self.group.close(slot)
            del self.lives[slot]

    @rule(seed=st.integers(0, 99), data=st.data())
    def begin(self, seed: int, data: st.DataObject) -> None:
        """The hypotheses grow with `finish`, so the oracle waits for that too."""
        free = [s for s, one in self.lives.items() if s not in self.is_stepping]
        slots = [s for s in free if not self.lives[s].is_ended and data.draw(st.booleans())]
        if not slots:
            return
        counts = [self.draw_count(self.lives[slot], data) for slot in slots]
        frames_BTV, encoded_BTD = logits(seed, len(slots)), torch.ones(len(slots), FRAMES, DIM)
        encoded_BTD *= torch.arange(1, len(slots) + 1)[:, None, None]
        for row, count in enumerate(counts):
            frames_BTV[row, count:] = encoded_BTD[row, count:] = torch.nan
        arrays: tuple[IntArray, IntArray] = np.array(slots), np.array(counts)
        finish = self.group.begin(*arrays, {"ctc": frames_BTV}, encoded_BTD)
        lives = [self.lives[slot] for slot in slots]

        def finish_both() -> None:
            finish()
            for row, (life, count) in enumerate(zip(lives, counts, strict=True)):
                life.alone.decode_chunk(frames_BTV[row : row + 1, :count].log_softmax(-1))
                life.heard += float(DIM * count * (row + 1))
            self.is_stepping.difference_update(slots)

        self.is_stepping.update(slots)
        self.begun.append(finish_both)

    @staticmethod
    def draw_count(life: Life, data: st.DataObject) -> int:
        """Only the last step of a stream that is kept gives fewer frames than all."""
        if life.options.rescoring:
            return data.draw(st.sampled_from([0, FRAMES]))
        return data.draw(st.integers(0, FRAMES))

    @precondition(lambda self: self.begun)
    @rule()
    def finish(self) -> None:
        self.begun.pop(0)()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slots = [
            slot for slot in self.lives if slot not in self.is_stepping and data.draw(st.booleans())
        ]
        asking = {
            slot: self.lives[slot]
            for slot in slots
            if self.lives[slot].options.rescoring and not self.lives[slot].is_ended
        }
        weighing = self.group.end(slots)
        for slot in slots:
            self.lives[slot].is_ended = True
        heard = {slot: life for slot, life in asking.items() if life.heard}
        assert (weighing is not None) == bool(heard)
        if weighing is not None:
            self.weighed.append((weighing, heard))

    @precondition(lambda self: self.weighed)
    @rule(number=st.integers(0, 9))
    def settle(self, number: int) -> None:
        weighing, heard = self.weighed.pop(number % len(self.weighed))
        weighing.weigh()
        weighing.settle()
        for slot, life in heard.items():
            if self.lives.get(slot) is life:
                life.final = life.rescored()

    @rule()
    def drop_idle_kinds(self) -> None:
        self.group.drop_idle_kinds()

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        slots = [slot for slot in self.lives if data.draw(st.booleans())]
        skips = [data.draw(st.integers(0, self.lives[slot].num_stable)) for slot in slots]
        found = zip(
            slots, skips, self.group.tails(slots, skips), self.group.best(slots, skips=skips),
            strict=True,
        )  # fmt: skip
        for slot, skip, tail, best in found:
            life = self.lives[slot]
            assert tuple(tail.tokens) == life.nbest[0].tokens[skip:]
            assert tail.num_stable == life.num_stable == self.group.num_stable(slot)
            assert_same_results(best, life.nbest[0].without_first(skip))

    @invariant()
    def every_stream_reads_as_if_alone(self) -> None:
        self.group.check_integrity(self.lives)
        for slot, life in self.lives.items():
            assert_same_results(self.group.nbest(slot, 10), life.nbest)
            assert self.group.is_rescored(slot) == (life.final is not None)


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=30)
