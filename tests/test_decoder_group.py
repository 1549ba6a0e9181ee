"""The decoders of all streams: which options are refused, and what a slot holds when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder
from oasr_backend.decoders.base import (
    CTC_SEARCHES,
    ChunkRows,
    Finish,
    SearchKind,
    SearchSettings,
    Tail,
)
from oasr_backend.decoders.greedy import GreedySearch
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.errors import InvalidRequestError, StreamStateError, UnknownStreamError
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis
from tests.decoder_groups import (
    CTC_WEIGHT,
    DIM,
    FRAMES,
    VOCAB,
    PlainScorer,
    decode,
    logits,
    new_group,
    plain_rescorer,
    weight_of,
)

BEAM = StreamOptions(decoder="prefix_beam", beam_size=4)
GREEDY = StreamOptions(decoder="greedy")
RESCORED = StreamOptions(decoder="prefix_beam", beam_size=4, rescoring=True)


class LoudestSearch:
    """From outside the package: says the unit that was loudest of all, once, and which it was."""

    def __init__(self, settings: SearchSettings) -> None:
        self._device = settings.device
        self._said: list[list[int]] = []
        self._times: list[list[int]] = []

    def grow(self, num_rows: int) -> None:
        self._said += [[-1]] * (num_rows - len(self._said))
        self._times += [[-1]] * (num_rows - len(self._times))

    def reset_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._said[row], self._times[row] = [], []

    def begin(self, frames_NTX: Tensor, chunk: ChunkRows) -> Finish:
        loudest_N = frames_NTX.to(self._device).amax(1).argmax(-1).tolist()

        def finish() -> None:
            for row, unit, start in zip(
                chunk.rows.tolist(), loudest_N, chunk.start_frames.tolist(), strict=True
            ):
                self._said[row].append(unit)
                self._times[row].append(start)

        return finish

    def num_stable(self, row: int) -> int:
        return len(self._said[row])

    def tail(self, row: int, skip: int) -> Tail:
        return Tail(self._said[row][skip:], len(self._said[row]))

    def hypotheses(self, row: int, nbest: int, *, skip: int = 0) -> list[Hypothesis]:
        said, times = tuple(self._said[row][skip:]), tuple(self._times[row][skip:])
        return [Hypothesis(said, 0.0, times)][:nbest]


#: A mapping as a checkpoint from outside would give it.
WITH_LOUDEST = MappingProxyType({
    "loudest": SearchKind("loudest", LoudestSearch, head="volume", honours=frozenset({"nbest"})),
    **CTC_SEARCHES,
})  # fmt: skip


def test_a_search_from_outside_decodes_beside_the_packages_own() -> None:
    group = new_group(searches=WITH_LOUDEST)
    assert group.resolve(StreamOptions(decoder="")).decoder == "loudest"
    group.open(0, StreamOptions(decoder=""))
    group.open(1, GREEDY)
    group.open(2, StreamOptions(decoder="loudest"))
    volume_BTX = torch.zeros(3, FRAMES, 5)
    volume_BTX[0, 1, 3] = volume_BTX[2, 2, 4] = 1.0
    for seed in range(2):
        heads = {"ctc": logits(seed, 3), "volume": volume_BTX}
        group.begin(np.arange(3), np.full(3, FRAMES), heads, torch.zeros(3, FRAMES, DIM))()
    assert group.best([0])[0] == Hypothesis((3, 3), 0.0, (0, FRAMES))
    assert group.tails([2, 0], [1, 2]) == [Tail([4], 2), Tail([], 2)]
    alone = GpuStreamingDecoder(GpuDecoderConfig(decoder="greedy"))
    alone.init_stream(1, VOCAB)
    for seed in range(2):
        alone.decode_chunk(logits(seed, 3)[1:2].log_softmax(-1))
    assert list(group.best([1])[0].tokens) == alone.peek().best()
    group.check_integrity({0, 1, 2})
    with pytest.raises(InvalidRequestError, match=r"hotwords='a'.*loudest.*decoder=prefix_beam"):
        group.check(StreamOptions(decoder="loudest", hotwords="a"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder": "beam"}, "decoder='beam' is unknown; send one of greedy, prefix_beam"),
        ({"nbest": 2}, "nbest=2 is outside 1 .. 1.*lower nbest, or send decoder=prefix_beam"),
        ({"decoder": "prefix_beam", "beam_size": 3, "nbest": 4}, "nbest=4 is outside 1 .. 3"),
        ({"hotwords": "a"}, "hotwords='a'.*leave hotwords out, or send decoder=prefix_beam"),
        ({"use_lm": True}, "use_lm=True.*leave use_lm out, or send decoder=prefix_beam"),
        ({"rescoring": True}, "rescoring=True.*, or send decoder=prefix_beam"),
        ({"decoder": "prefix_beam", "use_lm": True}, "no n-gram model"),
        ({"decoder": "prefix_beam", "rescoring": True}, "no attention decoder; leave rescoring"),
        ({"decoder": "prefix_beam", "hotwords": "\u2603"}, "cannot spell '\u2603'"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_named_with_the_remedy(
    options: dict[str, Any], words: str
) -> None:
    group, asked = new_group(), StreamOptions(**{"decoder": "greedy", **options})
    for use in (group.check, lambda one: group.open(0, one)):
        with pytest.raises(InvalidRequestError, match=words):
            use(asked)
    assert group.kinds == []
    group.check_integrity(set())


def test_where_no_search_honours_an_option_the_only_remedy_is_to_leave_it_out() -> None:
    group = new_group(searches={"greedy": CTC_SEARCHES["greedy"]})
    with pytest.raises(InvalidRequestError) as refused:
        group.check(StreamOptions(decoder="greedy", rescoring=True))
    assert str(refused.value).endswith("leave rescoring out")


@pytest.mark.parametrize("name", CTC_SEARCHES)
def test_a_search_honours_what_its_own_decoder_can_do(name: str) -> None:
    """The table against what the searches really keep."""
    kind = CTC_SEARCHES[name]
    config = GpuDecoderConfig(decoder=name, beam_size=4, nbest=kind.most_told(4))
    decoder = GpuStreamingDecoder(config)
    state = decoder.create_state(1, VOCAB)
    decoder.decode_chunk(logits(0, 1).log_softmax(-1), state)
    assert len(decoder.nbest(state, 10)) == kind.kept(4)
    assert (kind.most_told(4) > 1) == ("nbest" in kind.honours)


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_a_slot_is_opened_and_closed_once(options: StreamOptions) -> None:
    group = new_group()
    group.open(70, options)
    with pytest.raises(StreamStateError, match="slot 70 is open"):
        group.open(70, options)
    group.close(70)
    for use in (group.close, group.num_stable, lambda slot: group.tails([slot], [0])):
        with pytest.raises(UnknownStreamError, match="slot 70 has no decoder"):
            use(70)
    with pytest.raises(UnknownStreamError, match="slot 70"):
        decode(group, 0, [70])
    group.check_integrity(set())


def resets(group: DecoderGroup, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots that the group's greedy search puts back, as it does."""
    reset, found = GreedySearch.reset_rows, list[int]()

    def counted(search: GreedySearch, rows: Sequence[int]) -> None:
        found.extend(rows)
        reset(search, rows)

    monkeypatch.setattr(GreedySearch, "reset_rows", counted)
    return found


def test_a_slot_is_put_back_when_its_stream_closes_and_costs_nothing_to_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = new_group()
    found = resets(group, monkeypatch)
    group.open(3, GREEDY)
    assert found == [3], "a new row may hold anything"
    decode(group, 0, [3])
    group.close(3)
    group.open(3, GREEDY)
    assert found == [3, 3]
    group.close(3)
    assert found == [3, 3], "a stream without a frame leaves nothing"


def test_what_a_late_step_writes_is_gone_when_the_slot_is_opened_anew() -> None:
    group = new_group()
    group.open(0, GREEDY)
    arguments = np.zeros(1, np.int64), np.full(1, FRAMES), {"ctc": logits(0, 1)}
    finish = group.begin(*arguments, torch.zeros(1, FRAMES, DIM))
    group.close(0)
    finish()
    group.open(0, GREEDY)
    assert group.best([0]) == [Hypothesis((), 0.0)]


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_a_closed_slot_keeps_no_history_alive(options: StreamOptions) -> None:
    group = new_group()
    group.open(0, options)
    for seed in range(30):
        decode(group, seed, [0])
    search = group._kinds.one(0).search
    assert len(search.hypotheses(0, 1)[0].tokens) > 30
    group.close(0)
    assert search.hypotheses(0, 1) == [Hypothesis((), 0.0)]


@pytest.mark.parametrize("options", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_a_caller_may_use_its_arrays_again_before_a_step_is_finished(
    options: StreamOptions,
) -> None:
    group, twin = new_group(), new_group()
    for one in (group, twin):
        for slot in range(2):
            one.open(slot, options)
        slots_B, frames_B = np.arange(2), np.full(2, FRAMES)
        heads, encoded_BTD = {"ctc": logits(0, 2)}, torch.zeros(2, FRAMES, DIM)
        finish = one.begin(slots_B, frames_B, heads, encoded_BTD)
        if one is group:
            slots_B[:], frames_B[:] = [1, 0], 1
        finish()
    assert group.best([0, 1]) == twin.best([0, 1])


def test_idle_kinds_are_dropped_and_made_anew() -> None:
    group = new_group()
    for slot, options in enumerate((GREEDY, BEAM)):
        group.open(slot, options)
    decode(group, 0, [0, 1])
    (text,) = group.best([1])
    search = weakref.ref(group._kinds.one(0))
    group.close(0)
    group.drop_idle_kinds()
    gc.collect()
    assert (len(group.kinds), search()) == (1, None)
    group.open(0, GREEDY)
    decode(group, 1, [0])
    assert (group.best([1]), len(group.kinds)) == ([text], 2)
    group.check_integrity({0, 1})


def heard_group(num_streams: int, options: StreamOptions) -> DecoderGroup:
    group = new_group(second_pass=plain_rescorer())
    for slot in range(num_streams):
        group.open(slot, options)
    decode(group, 0, range(num_streams))
    return group


def expected_order(nbest: Sequence[Hypothesis], heard: float) -> list[tuple[int, ...]]:
    def score(one: Hypothesis) -> float:
        return weight_of(one.tokens, heard) + CTC_WEIGHT * one.score

    return [one.tokens for one in sorted(nbest, key=score, reverse=True)]


def test_the_order_changes_when_a_weighing_is_settled_and_not_before() -> None:
    group = heard_group(2, RESCORED)
    before = [group.nbest(slot, 4) for slot in range(2)]
    assert group.weighs_ends
    weighing = group.end([0, 1])
    assert weighing is not None
    assert group.end([0, 1]) is None, "each stream ends once"
    weighing.weigh()
    assert [group.nbest(slot, 4) for slot in range(2)] == before
    weighing.settle()
    for slot in range(2):
        order = expected_order(before[slot], heard=FRAMES * DIM)
        assert [one.tokens for one in group.nbest(slot, 4)] == order
        assert group.tails([slot], [1])[0].tokens == order[0][1:]
        assert group.is_rescored(slot)
    assert not group.weighs_ends
    group.check_integrity({0, 1})


@pytest.mark.parametrize("when", ["before weigh", "within weigh", "after weigh"])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_close_before_the_outcome_is_safe(
    when: str, is_reopened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot's next stream hears nothing of it, and those that ended with it lose nothing."""
    group = heard_group(3, RESCORED)
    expected = expected_order(group.nbest(2, 4), heard=FRAMES * DIM)

    def close() -> None:
        group.close(1)
        if is_reopened:
            group.open(1, RESCORED)
            decode(group, 5, [0, 1])

    weighing = group.end([1, 2])
    assert weighing is not None
    if when == "before weigh":
        close()
    elif when == "within weigh":
        once = iter([close])
        call = PlainScorer.__call__

        def closing(scorer: PlainScorer, *args: Any) -> Any:
            next(once)()
            return call(scorer, *args)

        monkeypatch.setattr(PlainScorer, "__call__", closing)
    weighing.weigh()
    if when == "after weigh":
        close()
    weighing.settle()
    assert [one.tokens for one in group.nbest(2, 4)] == expected
    assert group.is_rescored(2)
    open_slots = {0, 1, 2} if is_reopened else {0, 2}
    group.check_integrity(open_slots)
    if is_reopened:
        twin = new_group()
        twin.open(0, BEAM)
        heads = {"ctc": logits(5, 2)[1:]}
        twin.begin(np.zeros(1, np.int64), np.full(1, FRAMES), heads, torch.zeros(1, FRAMES, DIM))()
        assert not group.is_rescored(1)
        assert [one.tokens for one in group.nbest(1, 4)] == [one.tokens for one in twin.nbest(0, 4)]
    for slot in open_slots:
        group.close(slot)
    rescorer = group._final_order._second_pass
    assert rescorer.frames.num_free_blocks == rescorer.frames.num_blocks  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("full")])
def test_weigh_raises_nothing_and_a_fault_leaves_the_beams_order(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = heard_group(1, RESCORED)
    before = group.nbest(0, 4)
    weighing = group.end([0])
    assert weighing is not None

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(PlainScorer, "__call__", failing)
    weighing.weigh()
    weighing.settle()
    assert (group.nbest(0, 4), group.is_rescored(0)) == (before, False)
    assert "event=rescoring_failed" in caplog.text
    group.check_integrity({0})


def test_the_outcome_of_a_slots_last_stream_is_not_that_of_its_next_one() -> None:
    """Both have ended, and the older outcome comes first."""
    group = heard_group(1, RESCORED)
    older = group.end([0])
    group.close(0)
    group.open(0, RESCORED)
    decode(group, 7, [0])
    before = group.nbest(0, 4)
    newer = group.end([0])
    assert older is not None
    assert newer is not None
    for weighing in (older, newer):
        weighing.weigh()
    older.settle()
    assert (group.nbest(0, 4), group.is_rescored(0)) == (before, False)
    newer.settle()
    order = expected_order(before, heard=FRAMES * DIM)
    assert [one.tokens for one in group.nbest(0, 4)] == order
    assert group.is_rescored(0)
    group.check_integrity({0})


def test_streams_that_ask_for_nothing_have_nothing_to_weigh() -> None:
    group = heard_group(2, BEAM)
    assert not group.weighs_ends
    assert group.end([0, 1]) is None
