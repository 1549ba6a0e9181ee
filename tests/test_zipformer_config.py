"""What a Zipformer declares of itself under the server's chunks, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oasr_backend.cache import StreamStateSpec
from oasr_backend.errors import ConfigError
from oasr_backend.models import ChunkSettings
from oasr_backend.models.zipformer import StackConfig, ZipformerConfig, ZipformerEncoder
from tests.zipformer_helpers import golden_config

CHUNKS = ChunkSettings(16, 4)
SMALL = StackConfig(
    num_layers=2, downsampling=1, dim=12, num_heads=2, query_head_dim=5, position_head_dim=3,
    value_head_dim=4, feed_forward_dims=(9, 12, 15), conv_kernel_size=7,
)  # fmt: skip


def test_what_it_keeps_is_six_states_a_stack_and_two() -> None:
    spec = golden_config("zip_rnnt_small").under(CHUNKS)
    assert (spec.model_dim, spec.chunk_frames, spec.subsampling_rate) == (36, 8, 4)
    assert spec.attention is None
    assert (spec.chunk_frames - 1) * 4 + spec.right_context_frames + 1 == 2 * 16 + 13
    by_name = {state.name: state for state in spec.state_specs}
    assert len(spec.state_specs) == 6 * 6 + 2
    # The fourth stack: four layers, 8 heads of 8 and 6, at an eighth of 50 Hz.
    assert by_name["key_3"] == StreamStateSpec("key_3", (4, 8, 64), slot_axis=1)
    assert by_name["nonlin_3"].shape == (4, 8, 27)
    assert by_name["value1_3"].shape == by_name["value2_3"].shape == (4, 8, 48)
    assert by_name["conv1_3"].shape == by_name["conv2_3"].shape == (4, 7, 36)
    assert by_name["embed"].shape[1:] == (3, 19)
    assert by_name["processed"] == StreamStateSpec("processed", (), dtype=torch.int32)


@pytest.mark.parametrize("chunk_size", [-1, 0, 4, 12, 20, 17])
def test_a_chunk_that_a_stack_has_no_whole_frames_of_is_refused(chunk_size: int) -> None:
    config = golden_config("zip_rnnt_small")
    with pytest.raises(ConfigError, match=rf"chunk_size={chunk_size} .*multiple of 8.*8, 16, 24"):
        config.under(ChunkSettings(chunk_size, 4))


@pytest.mark.parametrize("left", [-1, 0])
def test_a_left_context_without_a_length_is_refused(left: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_left_chunks={left}, .*8 for 128 frames"):
        ZipformerEncoder(golden_config("zip_ctc_small")).set_chunks(ChunkSettings(16, left))


def test_before_it_is_told_its_chunks_are_the_usual_or_the_least() -> None:
    config = ZipformerConfig((SMALL,), 8, (2, 2, 2))
    assert ZipformerEncoder(config).spec == config.under(ChunkSettings(16, 8))
    thirds = ZipformerConfig((SMALL, replace(SMALL, downsampling=3)), 8, (2, 2, 2))
    assert ZipformerEncoder(thirds).spec == thirds.under(ChunkSettings(6, 8))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"conv_kernel_size": 8}, "conv_kernel_size=8 is even"),
        ({"num_heads": 0}, "num_heads=0 is below 1"),
        ({"downsampling": 0}, "downsampling=0 is below 1"),
        ({"dim": 1}, "dim=1 is below 2"),
        ({"feed_forward_dims": (4, 0, 4)}, "feed_forward_dim=0 is below 1"),
    ],
)
def test_sizes_of_no_stack_are_refused(wrong: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(SMALL, **wrong)  # type: ignore[arg-type]


def test_sizes_of_no_encoder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stacks=\(\) is empty"):
        ZipformerConfig((), 8, (2, 2, 2))
    with pytest.raises(ConfigError, match="pos_dim=7 is odd"):
        ZipformerConfig((SMALL,), 7, (2, 2, 2))
    with pytest.raises(ConfigError, match="num_mel_bins=6 is below 7"):
        ZipformerConfig((SMALL,), 8, (2, 2, 2), num_mel_bins=6)
