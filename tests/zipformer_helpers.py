"""Golden Zipformers read without a reader, and streams of features through an encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.cache import SlotStates
from oasr_backend.models import ChunkSettings, EncoderCaches, StreamingEncoder
from oasr_backend.models.zipformer import (
    StackConfig,
    ZipformerConfig,
    ZipformerEncoder,
    icefall_name,
)
from tests.conftest import GOLDEN_DIR

FloatArray = npt.NDArray[np.float32]
CPU = torch.device("cpu")
#: Frames of padding that end a stream, and their value.
TAIL_FRAMES, PADDING = 43, float(np.log(1e-10))


def golden_folder(name: str) -> Path:
    return GOLDEN_DIR / name


@cache
def golden_weights(name: str) -> Mapping[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(
        golden_folder(name) / "pretrained.pt", weights_only=True
    )["model"]
    return weights


@cache
def golden_expected(name: str) -> Mapping[str, npt.NDArray[Any]]:
    with np.load(golden_folder(name) / "expected.npz") as arrays:
        return dict(arrays)


@cache
def golden_config(name: str) -> ZipformerConfig:
    """From the shapes, but for the heads."""
    weights = golden_weights(name)
    told = json.loads((golden_folder(name) / "train_args.json").read_text(encoding="utf-8"))
    heads = [int(one) for one in str(told["num_heads"]).split(",")]
    stacks = tuple(
        _stack(weights, number, heads[min(number, len(heads) - 1)])
        for number in range(len(str(told["encoder_dim"]).split(",")))
    )
    position = _layer(weights, 0, "self_attn_weights.linear_pos.weight")
    channels = [weights[f"encoder_embed.conv.{index}.weight"].shape[0] for index in (0, 4, 7)]
    return ZipformerConfig(stacks, position.shape[1], (channels[0], channels[1], channels[2]))


def _prefix(weights: Mapping[str, Tensor], number: int) -> str:
    deeper = "encoder." if f"encoder.encoders.{number}.downsample.bias" in weights else ""
    return f"encoder.encoders.{number}.{deeper}layers."


def _layer(weights: Mapping[str, Tensor], number: int, name: str) -> Tensor:
    return weights[f"{_prefix(weights, number)}0.{name}"]


def _stack(weights: Mapping[str, Tensor], number: int, heads: int) -> StackConfig:
    prefix = _prefix(weights, number)
    layers = {key[len(prefix) :].partition(".")[0] for key in weights if key.startswith(prefix)}
    in_width, dim = _layer(weights, number, "self_attn_weights.in_proj.weight").shape
    position = _layer(weights, number, "self_attn_weights.linear_pos.weight").shape[0]
    hidden = [
        _layer(weights, number, f"feed_forward{one}.in_proj.weight").shape[0] for one in (1, 2, 3)
    ]
    down = weights.get(f"encoder.encoders.{number}.downsample.bias")
    return StackConfig(
        num_layers=len(layers),
        downsampling=1 if down is None else down.shape[0],
        dim=dim,
        num_heads=heads,
        query_head_dim=(in_width - position) // (2 * heads),
        position_head_dim=position // heads,
        value_head_dim=_layer(weights, number, "self_attn1.in_proj.weight").shape[0] // heads,
        feed_forward_dims=(hidden[0], hidden[1], hidden[2]),
        conv_kernel_size=_layer(
            weights, number, "conv_module1.depthwise_conv.chunkwise_conv.weight"
        ).shape[2],
    )


def golden_encoder(name: str, chunks: ChunkSettings) -> ZipformerEncoder:
    config, weights = golden_config(name), golden_weights(name)
    encoder = ZipformerEncoder(config)
    names = [key for key, _ in encoder.named_parameters()]
    encoder.load_state_dict({key: weights[icefall_name(key, config)] for key in names})
    return ready(encoder, chunks)


def random_encoder(config: ZipformerConfig, chunks: ChunkSettings, seed: int) -> ZipformerEncoder:
    """No weight is where it started, so that a part which is left out shows."""
    encoder, generator = ZipformerEncoder(config), torch.Generator().manual_seed(seed)
    for name, value in encoder.named_parameters():
        fan_in = max(1, value[0].numel()) if value.dim() > 1 else 4
        noise = torch.randn(value.shape, generator=generator) / fan_in**0.5
        value.data = noise + (0.5 if "bypass_scale" in name else 0.0)
    return ready(encoder, chunks)


def ready(encoder: ZipformerEncoder, chunks: ChunkSettings) -> ZipformerEncoder:
    """As a server prepares it."""
    encoder.eval().requires_grad_(False)
    encoder.set_chunks(chunks)
    encoder.tabulate_positions(0)
    return encoder


def chunks_of(setting: str) -> ChunkSettings:
    """Of a golden's setting, such as "c16_l4"."""
    chunk, left = setting.split("_")
    return ChunkSettings(int(chunk[1:]), int(left[1:]))


def windows_of(feats_TF: FloatArray, chunk_size: int) -> Iterator[Tensor]:
    """(W, F) windows of a whole stream with its tail, the last one filled up."""
    stride, size = 2 * chunk_size, 2 * chunk_size + 13
    padded = np.pad(
        feats_TF, ((0, TAIL_FRAMES + size), (0, 0)), constant_values=np.float32(PADDING)
    )
    for start in range(0, len(feats_TF) + TAIL_FRAMES, stride):
        yield torch.from_numpy(padded[start : start + size])


class PoisonedMixedStates(SlotStates):
    """A slot is NaN from its closing on, and a great number where it counts."""

    def _before_reuse(self, slot: int) -> None:
        for name, spec in self.specs.items():
            self.fill_slot(name, slot, float("nan") if spec.dtype is None else 10**6)


class ZipformerStreams:
    """Slots of one set of states, stepped by hand on windows that are given."""

    def __init__(
        self, encoder: StreamingEncoder, num_slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.encoder, self.dtype = encoder, dtype
        self.states = PoisonedMixedStates(encoder.spec.state_specs, num_slots, CPU, dtype=dtype)
        for slot in range(num_slots):
            self.states.close(slot)

    def open(self, slot: int) -> None:
        self.states.open(slot)

    def close(self, slot: int) -> None:
        self.states.close(slot)

    def step(
        self, slots: Sequence[int], windows: Sequence[Tensor], *, stores: bool = True
    ) -> Tensor:
        """(B, T, D) frames of one window of each slot."""
        rows_B = torch.tensor(slots)
        num_new_B = torch.full((len(slots),), self.encoder.spec.chunk_frames)
        views = self.states.staged_views(rows_B)
        caches = EncoderCaches([], torch.zeros_like(rows_B), num_new_B, views)
        with torch.inference_mode():
            encoded_BTD = self.encoder.forward_chunk(
                torch.stack(list(windows)).to(self.dtype), caches
            )
            if stores:
                caches.store()
        return encoded_BTD


def streamed(encoder: StreamingEncoder, feats_TF: FloatArray, chunk_size: int) -> FloatArray:
    """(T', D) of a whole stream with its tail, in a slot that another stream had before."""
    streams = ZipformerStreams(encoder, 1)
    streams.open(0)
    parts = [streams.step([0], [window_WF]) for window_WF in windows_of(feats_TF, chunk_size)]
    return torch.cat(parts, dim=1).squeeze(0).numpy()


def feats(num_frames: int, seed: int = 0) -> FloatArray:
    """(T, 80) that look like log-mel features."""
    generator = np.random.default_rng(seed)
    return generator.normal(-6, 4, (num_frames, 80)).astype(np.float32)
