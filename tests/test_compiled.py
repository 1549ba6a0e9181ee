"""A compiled encoder gives what the eager one gives, whatever rows a step has."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oasr_backend.compiled import SessionEncoder
from oasr_backend.errors import StreamStateError
from oasr_backend.models import EncoderCaches, StreamingEncoder
from oasr_backend.models.base import AttentionSpec, TrainedWindow
from oasr_backend.models.conformer import ConformerConfig, ConformerEncoder
from tests.compiled_helpers import (
    CHUNK,
    CPU,
    FeatureStreams,
    FloatArray,
    compiled,
    golden_encoder,
)
from tests.guards import GUARD_S
from tests.same_results import TOLERANCE
from tests.toy_family import installed

NUM_SLOTS = 4


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(name="session", scope="module")
def _session(folder: Path) -> SessionEncoder:
    """Of the golden checkpoint's encoder."""
    return compiled(golden_encoder(), folder)


def assert_close(found: list[FloatArray], expected: list[FloatArray]) -> None:
    assert len(found) == len(expected)
    for found_TD, expected_TD in zip(found, expected, strict=True):
        np.testing.assert_allclose(found_TD, expected_TD, atol=TOLERANCE, rtol=0)


#: What happens to a slot: it takes part in a step, or its stream ends and another one begins.
ACTIONS = st.lists(
    st.tuples(
        st.sets(st.integers(0, NUM_SLOTS - 1), min_size=1).map(sorted),
        st.booleans(),
        st.integers(1, CHUNK),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25)
@given(actions=ACTIONS, num_left_chunks=st.sampled_from([-1, 0, 1, 3]))
def test_any_rows_give_what_the_eager_encoder_gives(
    session: SessionEncoder, actions: list[tuple[list[int], bool, int]], num_left_chunks: int
) -> None:
    """Young, full and fresh rows side by side; a short chunk ends its streams."""
    both = [
        FeatureStreams(encoder, num_slots=NUM_SLOTS, num_left_chunks=num_left_chunks)
        for encoder in (session, golden_encoder())
    ]
    for streams in both:
        for slot in range(NUM_SLOTS):
            streams.open(slot, slot)
    name = NUM_SLOTS
    for slots, ends, last_frames in actions:
        num_new = last_frames if ends else None
        found, expected = (streams.step(slots, num_new=num_new) for streams in both)
        assert_close(found, expected)
        for slot in slots if ends else ():
            name += 1
            for streams in both:
                streams.close(slot)
                streams.open(slot, name)


def test_positions_that_are_counted_anew_give_what_the_eager_encoder_gives(
    session: SessionEncoder,
) -> None:
    """The limit is passed every third chunk, by each stream in a step of its own."""
    limit = 5 * CHUNK
    both = [
        FeatureStreams(encoder, position_limit=limit) for encoder in (session, golden_encoder())
    ]
    for streams in both:
        streams.open(0, 0)
        streams.open(1, 1)
        streams.step([1])
    for _ in range(12):
        assert_close(*(streams.step([0, 1]) for streams in both))


def test_a_stream_is_told_the_same_alone_and_among_others(session: SessionEncoder) -> None:
    """Wider than one run of the session, with streams that enter one after the other."""
    many, num_chunks = 19, 5
    crowd = FeatureStreams(session, num_slots=many)
    heard: dict[int, list[FloatArray]] = {slot: [] for slot in range(many)}
    for step in range(num_chunks + many):
        if step < many:
            crowd.open(step, step)
        slots = [slot for slot in range(min(step + 1, many)) if len(heard[slot]) < num_chunks]
        if slots:
            for slot, frames_TD in zip(slots, crowd.step(slots), strict=True):
                heard[slot].append(frames_TD)
    for slot, frames in heard.items():
        alone = FeatureStreams(session, num_slots=1)
        alone.open(0, slot)
        assert_close(frames, [alone.step([0])[0] for _ in range(num_chunks)])


def test_steps_of_several_threads_at_once_give_what_they_give_one_by_one(
    session: SessionEncoder,
) -> None:
    groups = ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9, 10, 11, 12])
    num_slots, num_chunks = 13, 12

    def opened() -> FeatureStreams:
        streams = FeatureStreams(session, num_slots=num_slots)
        for slot in range(num_slots):
            streams.open(slot, slot)
        return streams

    one_by_one, at_once = opened(), opened()
    expected = {
        index: [one_by_one.step(group) for _ in range(num_chunks)]
        for index, group in enumerate(groups)
    }
    found: dict[int, list[list[FloatArray]]] = {}
    start = threading.Barrier(len(groups), timeout=GUARD_S)

    def run(index: int) -> None:
        start.wait()
        found[index] = [at_once.step(groups[index]) for _ in range(num_chunks)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    for index, steps in expected.items():
        for found_rows, expected_rows in zip(found[index], steps, strict=True):
            for found_TD, expected_TD in zip(found_rows, expected_rows, strict=True):
                np.testing.assert_array_equal(found_TD, expected_TD)


def test_one_session_serves_several_stores_by_turns(session: SessionEncoder) -> None:
    stores = [FeatureStreams(session, num_slots=1) for _ in range(2)]
    for streams in stores:
        streams.open(0, 0)
    for _ in range(4):
        first, second = (streams.step([0])[0] for streams in stores)
        np.testing.assert_array_equal(first, second)


def test_caches_that_show_no_pool_are_refused(session: SessionEncoder) -> None:
    one_B = torch.ones(1, dtype=torch.int64)
    caches = EncoderCaches([], one_B, one_B, {})
    with pytest.raises(StreamStateError, match=r"take a step's caches from KvStore\.views"):
        session.forward_chunk(torch.zeros(1, 19, 80), caches)


# Other encoders


def conformer(seed: int = 0, **changes: object) -> ConformerEncoder:
    sizes = ConformerConfig(
        num_mel_bins=80, model_dim=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4,
        feed_forward_dim=24, conv_kernel_size=5,
    )  # fmt: skip
    torch.manual_seed(seed)
    encoder = ConformerEncoder(replace(sizes, **changes))  # type: ignore[arg-type]
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return prepared(encoder)


def prepared(encoder: StreamingEncoder) -> StreamingEncoder:  # type: ignore[misc]
    encoder.eval().requires_grad_(False)
    encoder.tabulate_positions(512)
    return encoder


def assert_served_alike(encoder: StreamingEncoder, folder: Path, *, num_features: int = 80) -> None:
    session = compiled(encoder, folder, num_features=num_features)
    both = [FeatureStreams(one, num_features=num_features) for one in (session, encoder)]
    for slots in ([0], [0, 1], [2, 1, 0], [2, 0], [3, 1], [0, 1, 2, 3]):
        for streams in both:
            for slot in slots:
                if not streams.is_open(slot):
                    streams.open(slot, slot)
        assert_close(*(streams.step(slots) for streams in both))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"num_kv_heads": 1},
        {"activation": "relu", "macaron": False},
        {"activation": "gelu", "conv_layer_norm": False},
        {"activation": "hardtanh", "subsampling": "conv2d6"},
        {"activation": "selu", "subsampling": "conv2d8"},
        {"conv_kernel_size": 1},
        {"conv_kernel_size": 31},
        {"num_layers": 1, "head_dim": 6},
    ],
    ids=str,
)
def test_every_kind_of_conformer_is_compiled(changes: dict[str, object], folder: Path) -> None:
    assert_served_alike(conformer(**changes), folder)


def test_an_encoder_of_states_alone_is_compiled(tmp_path: Path) -> None:
    with installed(tmp_path):
        from toy_family.model import LeakyEncoder  # type: ignore[import-not-found]

        torch.manual_seed(0)
        encoder = prepared(LeakyEncoder())
        assert encoder.spec.attention is None
        assert encoder.spec.state_specs
        assert_served_alike(encoder, tmp_path / "encoders", num_features=8)


@pytest.mark.parametrize("window", [None, 5, 9])
def test_a_family_that_no_graph_knows_of_is_compiled(window: int | None, tmp_path: Path) -> None:
    """Also with a trained window, which a stream starts with, and which is no whole chunk."""
    with installed(tmp_path):
        from attending_family.model import ToyEncoder  # type: ignore[import-not-found]

        torch.manual_seed(0)
        encoder = ToyEncoder()
        if window is not None:
            attention = AttentionSpec(1, 2, 16, TrainedWindow(window))
            encoder.spec = replace(encoder.spec, attention=attention)
        assert_served_alike(prepared(encoder), tmp_path / "encoders")


class TwoStates(StreamingEncoder):
    """Keeps a sum and a count, each on another axis, and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))

    @property
    def spec(self):  # type: ignore[no-untyped-def]
        from oasr_backend.cache import StreamStateSpec
        from oasr_backend.models import EncoderSpec

        return EncoderSpec(
            model_dim=3, subsampling_rate=1, right_context_frames=0,
            state_specs=(
                StreamStateSpec("sum", (2, 3), slot_axis=1),
                StreamStateSpec("count", (1,), dtype=torch.int64),
            ),
        )  # fmt: skip

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        total, count = caches.states["sum"], caches.states["count"]
        sum_2BF = total.gather() + features_BWF.sum(1)
        heard_B1 = count.gather() + caches.num_new_B.unsqueeze(1)
        total.scatter(sum_2BF)
        count.scatter(heard_B1)
        mean_BF = sum_2BF[0] / heard_B1
        return features_BWF * self.scale + mean_BF.unsqueeze(1)


def test_several_states_of_several_types_are_compiled(tmp_path: Path) -> None:
    assert_served_alike(prepared(TwoStates()), tmp_path, num_features=3)


class Windows(StreamingEncoder):
    """Sums of sliding windows, one of them by layers; each takes `num_new` frames a step."""

    def __init__(self, num_new: int) -> None:
        super().__init__()
        self.num_new = num_new

    @property
    def spec(self):  # type: ignore[no-untyped-def]
        from oasr_backend.cache import StreamStateSpec
        from oasr_backend.models import EncoderSpec

        return EncoderSpec(
            model_dim=3, subsampling_rate=1, right_context_frames=0,
            state_specs=(
                StreamStateSpec("flat", (3, 4)),
                StreamStateSpec("deep", (2, 4, 3), slot_axis=1),
                StreamStateSpec("kept", (2, 4, 3), slot_axis=1),
            ),
        )  # fmt: skip

    def forward_chunk(self, features_BWF: Tensor, caches: EncoderCaches) -> Tensor:
        flat, deep, kept = (caches.states[spec.name] for spec in self.spec.state_specs)
        new_BnF = torch.cat((features_BWF, features_BWF * 0.5), dim=1)[:, : self.num_new]
        stored_BF = deep.layer(0).gather().sum(1) + flat.gather().sum(2)
        flat.roll_in(new_BnF.transpose(1, 2), axis=2)
        deep.roll_in(torch.stack((new_BnF, new_BnF * 2)), axis=2)
        # What was handed over is read, and what was stored by layers.
        stored_BF = stored_BF + deep.gather()[1].sum(1) - deep.layer(1).gather().sum(1)
        kept.roll_in(torch.stack((new_BnF[:, :1], new_BnF[:, :1])), axis=2)
        kept.scatter((kept.gather() + deep.gather()) * 0.5)
        return features_BWF + 0.1 * (stored_BF + kept.gather()[0].sum(1)).unsqueeze(1)


@pytest.mark.parametrize("num_new", [1, 3, 4, 6])
def test_sliding_windows_are_compiled(num_new: int, tmp_path: Path) -> None:
    assert_served_alike(prepared(Windows(num_new)), tmp_path, num_features=3)


def test_the_compiled_encoder_holds_no_weights(session: SessionEncoder) -> None:
    assert not list(session.parameters())
    assert not list(session.buffers())
    assert session.spec == golden_encoder().spec
    assert session.to(CPU) is session
