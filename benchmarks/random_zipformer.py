"""Checkpoints in icefall's layout with random weights, of the sizes that it publishes.

`medium` is the default of its streaming recipe, with 66 M parameters; `small` and `large` are the
geometries of its scaled models (egs/librispeech/ASR/RESULTS.md). A folder holds pretrained.pt,
tokens.txt and train_args.json. What is heard means nothing. Norms and bypasses lie near where
training begins, so that activations stay finite in half precision, and blank is favoured so that a
transducer emits a token every few frames, as in speech.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Output heads that icefall's recipe can train.
HEADS = ("transducer", "ctc")
#: How much higher a blank's logit lies than the others. Theirs spread by about 0.9, so that with
#: 500 units it is beaten in one frame of three to ten.
_BLANK_LEAD = {"transducer": 2.8, "ctc": 1.7}
#: Frames of random weights differ little in time; so much larger, they turn the joiner's units.
_JOINER_GAIN = 4.0
_MEL_COLUMNS = 19


@dataclass(frozen=True)
class ZipformerSize:
    """One entry a stack in each tuple."""

    num_layers: tuple[int, ...] = (2, 2, 3, 4, 3, 2)
    dims: tuple[int, ...] = (192, 256, 384, 512, 384, 256)
    feed_forward_dims: tuple[int, ...] = (512, 768, 1024, 1536, 1024, 768)
    downsampling: tuple[int, ...] = (1, 2, 4, 8, 4, 2)
    num_heads: tuple[int, ...] = (4, 4, 4, 8, 4, 4)
    kernel_sizes: tuple[int, ...] = (31, 31, 15, 15, 15, 31)
    query_head_dim: int = 32
    position_head_dim: int = 4
    value_head_dim: int = 12
    pos_dim: int = 48
    conv_channels: tuple[int, int, int] = (8, 32, 128)
    decoder_dim: int = 512
    joiner_dim: int = 512
    context_size: int = 2

    @property
    def model_dim(self) -> int:
        return max(self.dims)


SIZES = {
    "small": ZipformerSize(
        num_layers=(2, 2, 2, 2, 2, 2),
        dims=(192, 256, 256, 256, 256, 256),
        feed_forward_dims=(512, 768, 768, 768, 768, 768),
    ),
    "medium": ZipformerSize(),
    "large": ZipformerSize(
        num_layers=(2, 2, 4, 5, 4, 2),
        dims=(192, 256, 512, 768, 512, 256),
        feed_forward_dims=(512, 768, 1536, 2048, 1536, 768),
    ),
}


def write_random_zipformer(
    directory: Path,
    size: ZipformerSize | None = None,
    *,
    heads: tuple[str, ...] = HEADS,
    vocab_size: int = 500,
    seed: int = 0,
) -> Path:
    """Writes pretrained.pt, tokens.txt and train_args.json; returns the directory.

    Raises ValueError for a head that icefall does not train, and for none.
    """
    if not heads or not set(heads) <= set(HEADS):
        raise ValueError(f"heads={heads}; give one or more of {', '.join(HEADS)}")
    size = size or ZipformerSize()
    directory.mkdir(parents=True, exist_ok=True)
    weights = random_weights(size, heads=heads, vocab_size=vocab_size, seed=seed)
    torch.save({"model": weights}, directory / "pretrained.pt")
    pieces = ["<blk>", "<sos/eos>", "<unk>", *(f"▁u{index}" for index in range(3, vocab_size))]
    lines = "".join(f"{piece} {index}\n" for index, piece in enumerate(pieces))
    (directory / "tokens.txt").write_text(lines, encoding="utf-8")
    text = json.dumps(_train_args(size, heads), indent=1)
    (directory / "train_args.json").write_text(text + "\n", encoding="utf-8")
    return directory


def random_weights(
    size: ZipformerSize, *, heads: tuple[str, ...] = HEADS, vocab_size: int = 500, seed: int = 0
) -> dict[str, Tensor]:
    """By icefall's names, those that only training reads among them."""
    return _Weights(size, vocab_size, torch.Generator().manual_seed(seed)).of(heads)


def _train_args(size: ZipformerSize, heads: tuple[str, ...]) -> dict[str, Any]:
    def listed(values: tuple[int, ...]) -> str:
        return ",".join(map(str, values))

    return {
        "num_encoder_layers": listed(size.num_layers),
        "downsampling_factor": listed(size.downsampling),
        "feedforward_dim": listed(size.feed_forward_dims),
        "num_heads": listed(size.num_heads),
        "encoder_dim": listed(size.dims),
        "query_head_dim": str(size.query_head_dim),
        "value_head_dim": str(size.value_head_dim),
        "pos_head_dim": str(size.position_head_dim),
        "pos_dim": size.pos_dim,
        "cnn_module_kernel": listed(size.kernel_sizes),
        "decoder_dim": size.decoder_dim,
        "joiner_dim": size.joiner_dim,
        "causal": True,
        "context_size": size.context_size,
        "use_transducer": "transducer" in heads,
        "use_ctc": "ctc" in heads,
        "feature_dim": 80,
    }


class _Weights:
    """Fills a state_dict by icefall's names, part after part."""

    def __init__(self, size: ZipformerSize, vocab_size: int, generator: torch.Generator) -> None:
        self._size, self._vocab_size = size, vocab_size
        self._generator = generator
        self._of: dict[str, Tensor] = {}

    def of(self, heads: tuple[str, ...]) -> dict[str, Tensor]:
        self._front_end()
        for index, ratio in enumerate(self._size.downsampling):
            stack = f"encoder.encoders.{index}"
            dim = self._size.dims[index]
            if ratio > 1:
                self._of[f"{stack}.downsample.bias"] = self._random(ratio, std=0.5)
                self._bypass(f"{stack}.out_combiner.bypass_scale", dim)
                stack += ".encoder"
            for number in range(self._size.num_layers[index]):
                self._layer(f"{stack}.layers.{number}", index)
        self._of["encoder.downsample_output.bias"] = self._random(2, std=0.5)
        if "transducer" in heads:
            self._transducer()
        if "ctc" in heads:
            self._output("ctc_output.1", self._size.model_dim, lead=_BLANK_LEAD["ctc"])
        return self._of

    def _front_end(self) -> None:
        first, second, third = self._size.conv_channels
        embed = "encoder_embed"
        self._linear(f"{embed}.conv.0", first, 1, 3, 3)
        self._linear(f"{embed}.conv.4", second, first, 3, 3)
        self._linear(f"{embed}.conv.7", third, second, 3, 3)
        self._linear(f"{embed}.convnext.depthwise_conv", third, 1, 7, 7)
        self._linear(f"{embed}.convnext.pointwise_conv1", 3 * third, third, 1, 1)
        self._linear(f"{embed}.convnext.pointwise_conv2", third, 3 * third, 1, 1)
        self._linear(f"{embed}.out", self._size.dims[0], third * _MEL_COLUMNS)
        self._norm(f"{embed}.out_norm", self._size.dims[0])

    def _layer(self, layer: str, index: int) -> None:
        size, dim, heads = self._size, self._size.dims[index], self._size.num_heads[index]
        query, position = heads * size.query_head_dim, heads * size.position_head_dim
        attention = f"{layer}.self_attn_weights"
        self._linear(f"{attention}.in_proj", 2 * query + position, dim)
        # A query and a key are summed over without a division by a root.
        self._of[f"{attention}.in_proj.weight"] *= size.query_head_dim**-0.25
        self._linear(f"{attention}.linear_pos", position, size.pos_dim, bias=False)
        value = heads * size.value_head_dim
        for number in (1, 2):
            self._linear(f"{layer}.self_attn{number}.in_proj", value, dim)
            self._linear(f"{layer}.self_attn{number}.out_proj", dim, value)
            self._convolution(f"{layer}.conv_module{number}", dim, size.kernel_sizes[index])
        hidden = 3 * dim // 4
        self._linear(f"{layer}.nonlin_attention.in_proj", 3 * hidden, dim)
        self._linear(f"{layer}.nonlin_attention.out_proj", dim, hidden)
        width = size.feed_forward_dims[index]
        for number, inner in enumerate((3 * width // 4, width, 5 * width // 4), start=1):
            self._linear(f"{layer}.feed_forward{number}.in_proj", inner, dim)
            self._linear(f"{layer}.feed_forward{number}.out_proj", dim, inner)
        self._norm(f"{layer}.norm", dim)
        for name in ("bypass.bypass_scale", "bypass_mid.bypass_scale", "bypass_scale"):
            self._bypass(f"{layer}.{name}", dim)

    def _convolution(self, module: str, dim: int, kernel_size: int) -> None:
        self._linear(f"{module}.in_proj", 2 * dim, dim)
        depthwise = f"{module}.depthwise_conv"
        self._linear(f"{depthwise}.causal_conv", dim, 1, (kernel_size + 1) // 2)
        self._linear(f"{depthwise}.chunkwise_conv", dim, 1, kernel_size)
        scale = self._random(2, dim, kernel_size, std=0.1)
        self._of[f"{depthwise}.chunkwise_conv_scale"] = scale
        self._linear(f"{module}.out_proj", dim, dim)

    def _transducer(self) -> None:
        size, vocab_size = self._size, self._vocab_size
        dim, width = size.decoder_dim, size.joiner_dim
        self._of["decoder.embedding.weight"] = self._random(vocab_size, dim, std=1.0)
        if size.context_size > 1:
            self._linear("decoder.conv", dim, 4, size.context_size, bias=False)
        self._linear("joiner.encoder_proj", width, size.model_dim)
        self._of["joiner.encoder_proj.weight"] *= _JOINER_GAIN
        self._linear("joiner.decoder_proj", width, dim)
        self._output("joiner.output_linear", width, lead=_BLANK_LEAD["transducer"])
        # For the losses of training alone.
        self._linear("simple_am_proj", vocab_size, size.model_dim)
        self._linear("simple_lm_proj", vocab_size, dim)

    # Parts of parts

    def _random(self, *shape: int, std: float) -> Tensor:
        return torch.randn(shape, generator=self._generator) * std

    def _linear(self, name: str, *shape: int, bias: bool = True) -> None:
        fan_in = torch.Size(shape[1:]).numel()
        self._of[f"{name}.weight"] = self._random(*shape, std=fan_in**-0.5)
        if bias:
            self._of[f"{name}.bias"] = self._random(shape[0], std=0.02)

    def _output(self, name: str, dim: int, *, lead: float) -> None:
        self._linear(name, self._vocab_size, dim)
        self._of[f"{name}.bias"][0] = lead

    def _norm(self, name: str, dim: int) -> None:
        self._of[f"{name}.log_scale"] = torch.tensor(0.0)
        self._of[f"{name}.bias"] = self._random(dim, std=0.1)

    def _bypass(self, name: str, dim: int) -> None:
        self._of[name] = 0.5 + self._random(dim, std=0.1)
