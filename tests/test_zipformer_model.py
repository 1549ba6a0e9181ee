"""The Zipformer encoder: icefall's frames, its own reference's, and the same in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from oasr_backend.models import ChunkSettings
from oasr_backend.models.zipformer import (
    StackConfig,
    ZipformerConfig,
    ZipformerEncoder,
    icefall_name,
)
from tests.reference import zipformer as reference
from tests.zipformer_helpers import (
    FloatArray,
    ZipformerStreams,
    chunks_of,
    feats,
    golden_config,
    golden_encoder,
    golden_expected,
    golden_weights,
    random_encoder,
    streamed,
    windows_of,
)

NAMES = ("zip_ctc_small", "zip_rnnt_small")
SETTINGS = [(name, str(one)) for name in NAMES for one in golden_expected(name)["settings"]]
#: Of float32 against icefall's float32, and of two ways to the same float32 numbers.
GOLDEN_TOLERANCE, TOLERANCE = 1e-4, 1e-5
CHUNKS = ChunkSettings(16, 4)


# Against icefall


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_the_frames_are_icefalls(name: str, setting: str) -> None:
    expected, chunks = golden_expected(name), chunks_of(setting)
    found_TD = streamed(golden_encoder(name, chunks), expected["feats"], chunks.chunk_size)
    np.testing.assert_allclose(found_TD, expected[f"{setting}.enc"], rtol=0, atol=GOLDEN_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_what_each_part_gives_is_icefalls(name: str) -> None:
    expected = golden_expected(name)
    setting = str(expected["settings"][0])
    chunks = chunks_of(setting)
    encoder = golden_encoder(name, chunks)
    given_by: dict[str, Tensor] = {}
    parts = {"embed": encoder.encoder_embed}
    parts |= {f"stack{i}": stack for i, stack in enumerate(encoder.encoders)}
    for part, module in parts.items():

        def keep(_: nn.Module, __: object, output: object, part: str = part) -> None:
            given_by[part] = output[0] if isinstance(output, tuple) else output  # type: ignore[assignment]

        module.register_forward_hook(keep)
    streams = ZipformerStreams(encoder, 1)
    streams.open(0)
    for number, window_WF in enumerate(windows_of(expected["feats"], chunks.chunk_size)):
        streams.step([0], [window_WF])
        for part in parts if number in (0, 4) else ():
            of_icefall = expected[f"{setting}.w{number}.{part}"]
            np.testing.assert_allclose(
                given_by[part].numpy(), of_icefall, rtol=0, atol=GOLDEN_TOLERANCE
            )


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_the_encoder_has_its_key_in_the_checkpoint(name: str) -> None:
    config = golden_config(name)
    parameters = dict(ZipformerEncoder(config).named_parameters())
    keys = {icefall_name(own, config): tuple(value.shape) for own, value in parameters.items()}
    stored = {
        key: tuple(value.shape)
        for key, value in golden_weights(name).items()
        if key.startswith("encoder") and not _is_left_over(key)
    }
    assert keys == stored


def _is_left_over(key: str) -> bool:
    """`layers.N.bypass_scale`, which nothing reads."""
    return key.endswith(".bypass_scale") and key.split(".")[-2].isdigit()


# Against the reference


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_icefalls_whole_utterance(name: str) -> None:
    expected = golden_expected(name)
    setting = str(expected["settings"][0])
    found_TD = offline(golden_weights(name), golden_config(name), expected["feats"], setting)
    of_icefall = expected[f"offline_{setting}.enc"]
    np.testing.assert_allclose(found_TD, of_icefall, rtol=0, atol=GOLDEN_TOLERANCE)


def offline(
    weights: object, config: ZipformerConfig, feats_TF: FloatArray, setting: str
) -> reference.Array:
    chunks = chunks_of(setting)
    windows = list(windows_of(feats_TF, chunks.chunk_size))
    stride = 2 * chunks.chunk_size
    whole = [window[:stride] for window in windows[:-1]] + [windows[-1]]
    left = chunks.chunk_size * chunks.num_left_chunks
    return reference.encode(
        torch.cat(whole).numpy(),
        weights,  # type: ignore[arg-type]
        tuple(stack.num_heads for stack in config.stacks),
        reference.Chunking(chunks.chunk_size, left),
    )


STACKS = st.builds(
    StackConfig,
    num_layers=st.integers(1, 2),
    downsampling=st.sampled_from([1, 2, 3, 4]),
    dim=st.integers(5, 20),
    num_heads=st.integers(1, 3),
    query_head_dim=st.integers(1, 6),
    position_head_dim=st.integers(1, 4),
    value_head_dim=st.integers(1, 5),
    feed_forward_dims=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    conv_kernel_size=st.sampled_from([1, 3, 7, 15, 31]),
)


@settings(max_examples=12)
@given(data=st.data(), stacks=st.lists(STACKS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_chunk_by_chunk_is_the_whole_utterance_at_once(
    data: st.DataObject, stacks: list[StackConfig], seed: int
) -> None:
    config = ZipformerConfig(tuple(stacks), data.draw(st.sampled_from([2, 8])), (2, 3, 4))
    chunk = config.chunk_multiple * data.draw(st.integers(1, max(1, 24 // config.chunk_multiple)))
    setting = f"c{chunk}_l{data.draw(st.integers(1, 4))}"
    encoder = random_encoder(config, chunks_of(setting), seed)
    feats_TF = feats(data.draw(st.integers(0, 130)), seed)
    weights = {icefall_name(own, config): one for own, one in encoder.named_parameters()}
    found_TD = streamed(encoder, feats_TF, chunk)
    expected_TD = offline(weights, config, feats_TF, setting)
    scale = max(1.0, float(np.abs(expected_TD).max()))
    np.testing.assert_allclose(found_TD, expected_TD, rtol=0, atol=TOLERANCE * scale)


# In company


@pytest.fixture(name="encoder", scope="module")
def _encoder() -> ZipformerEncoder:
    return golden_encoder("zip_rnnt_small", CHUNKS)


def test_a_stream_is_told_the_same_alone_and_at_any_offset_among_others(
    encoder: ZipformerEncoder,
) -> None:
    """Slots begin as NaN of others; streams enter late, pause and change rows."""
    feats_TF = golden_expected("zip_rnnt_small")["feats"]
    alone_TD = streamed(encoder, feats_TF, CHUNKS.chunk_size)
    windows = list(windows_of(feats_TF, CHUNKS.chunk_size))
    streams = ZipformerStreams(encoder, 5)
    heard: dict[int, list[Tensor]] = {4: [], 1: [], 2: []}
    enters = {4: 0, 1: 1, 2: 3}
    step = 0
    while any(len(frames) < len(windows) for frames in heard.values()):
        for slot, first in enters.items():
            if first == step:
                streams.open(slot)
        there = [slot for slot, first in enters.items() if first <= step]
        slots = [s for s in there if len(heard[s]) < len(windows) and (step + s) % 3]
        if slots:
            slots = slots[:: 1 if step % 2 else -1]
            frames_BTD = streams.step(slots, [windows[len(heard[slot])] for slot in slots])
            for slot, frames_TD in zip(slots, frames_BTD, strict=True):
                heard[slot].append(frames_TD)
        step += 1
    for frames in heard.values():
        np.testing.assert_allclose(torch.cat(frames).numpy(), alone_TD, rtol=0, atol=TOLERANCE)


def test_a_slot_that_is_used_again_holds_nothing_of_the_stream_before(
    encoder: ZipformerEncoder,
) -> None:
    windows = list(windows_of(feats(200), CHUNKS.chunk_size))
    streams = ZipformerStreams(encoder, 2)
    streams.open(0)
    first = [streams.step([0], [window]) for window in windows]
    streams.close(0)
    streams.open(0)
    again = [streams.step([0], [window]) for window in windows]
    assert torch.equal(torch.cat(first), torch.cat(again))


def test_a_step_that_is_not_stored_can_be_run_again(encoder: ZipformerEncoder) -> None:
    windows = list(windows_of(feats(120), CHUNKS.chunk_size))
    streams = ZipformerStreams(encoder, 1)
    streams.open(0)
    streams.step([0], windows[:1])
    once = streams.step([0], windows[1:2], stores=False)
    again = streams.step([0], windows[1:2])
    assert torch.equal(once, again)
    assert torch.equal(windows[1], list(windows_of(feats(120), CHUNKS.chunk_size))[1])


def test_a_stream_of_any_length_counts_no_further_than_its_left_context(
    encoder: ZipformerEncoder,
) -> None:
    streams = ZipformerStreams(encoder, 1)
    streams.open(0)
    counts = []
    for window_WF in windows_of(feats(400), CHUNKS.chunk_size):
        streams.step([0], [window_WF])
        counts.append(int(streams.states.buffer_of("processed")[0]))
    assert counts[:6] == [16, 32, 48, 64, 64, 64]
    assert max(counts) == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near(dtype: torch.dtype) -> None:
    expected_TD = golden_expected("zip_ctc_small")["c16_l4.enc"]
    encoder = golden_encoder("zip_ctc_small", CHUNKS).to(dtype)
    streams = ZipformerStreams(encoder, 1, dtype)
    streams.open(0)
    windows = windows_of(golden_expected("zip_ctc_small")["feats"], CHUNKS.chunk_size)
    parts = [streams.step([0], [window_WF]).float() for window_WF in windows]
    difference = torch.cat(parts, dim=1)[0].numpy() - expected_TD
    error = np.sqrt(np.square(difference).mean() / np.square(expected_TD).mean())
    assert error < (0.01 if dtype == torch.float16 else 0.08)
