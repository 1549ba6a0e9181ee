"""The sizes of a Zipformer, read from the shapes of its tensors; the heads are told.

Letters of icefall's sizes: h heads, and q, p and v channels of each for queries and keys, positions
and values. A shape gives h*q, h*p and h*v alone.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from oasr_backend.checkpoints.icefall.arguments import Arguments, written
from oasr_backend.checkpoints.weights import Weights
from oasr_backend.errors import CheckpointError, ConfigError
from oasr_backend.models.zipformer import StackConfig, ZipformerConfig

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^encoder\.encoders\.(\d+)\.(?:encoder\.)?layers\.(\d+)\.")
#: icefall's q, p and v unless training chose others.
_USUAL_SIZES = {"query_head_dim": 32, "pos_head_dim": 4, "value_head_dim": 12}
_MEL_BINS = 80
_MEL_COLUMNS = 19


class _Stack(NamedTuple):
    """What the shapes say of one stack; the products are h*q, h*p and h*v."""

    num_layers: int
    downsampling: int
    dim: int
    products: tuple[int, int, int]
    feed_forward_dims: tuple[int, int, int]
    kernel_size: int
    pos_dim: int


def read_architecture(weights: Weights, arguments: Arguments) -> ZipformerConfig:
    """Raises CheckpointError for what the shapes or the arguments leave open or do not agree in."""
    stacks = _stacks(weights)
    _check_output(weights)
    heads = _num_heads(stacks, weights, arguments)
    configs = tuple(
        _config(number, stack, num_heads, weights, arguments)
        for number, (stack, num_heads) in enumerate(zip(stacks, heads, strict=True))
    )
    pos_dims = {stack.pos_dim for stack in stacks}
    if len(pos_dims) > 1:
        raise CheckpointError(
            f"{weights.path}: position encodings are of {sorted(pos_dims)} values in one model; "
            f"take all tensors from one training"
        )
    _check_arguments(stacks, configs, weights, arguments)
    try:
        return ZipformerConfig(configs, pos_dims.pop(), _conv_channels(weights), _MEL_BINS)
    except ConfigError as error:
        raise CheckpointError(f"{weights.path}: {error}") from error


def check_said(arguments: Arguments, name: str, sizes: tuple[int, ...], weights: Weights) -> None:
    """Raises CheckpointError with both where an argument differs from what the weights have."""
    said = arguments.numbers(name, len(sizes))
    if said is not None and said.value != sizes:
        raise CheckpointError(
            f"{said.source}: {name}={written(said.value)}, but the weights of {weights.path} have "
            f"{written(sizes)}; take both from one training, or correct it"
        )


def dims_of(weights: Weights, name: str, count: int) -> tuple[int, ...]:
    """The shape of a tensor. Raises CheckpointError for one without `count` dimensions."""
    shape = weights.shape_of(name)
    if len(shape) != count or not all(shape):
        raise CheckpointError(
            f"{weights.path}: {weights.name_in_file(name)} is of shape {shape}, and a Zipformer's "
            f"has {count} sizes of 1 or more; give the weights of a streaming Zipformer"
        )
    return shape


def _stacks(weights: Weights) -> list[_Stack]:
    layers: dict[int, set[int]] = {}
    for name in weights.names:
        if found := _LAYER.match(name):
            layers.setdefault(int(found[1]), set()).add(int(found[2]))
    for number, of_stack in enumerate([set(layers), *layers.values()]):
        if of_stack != set(range(len(of_stack))) or not of_stack:
            what = "layers of a stack" if number else "stacks"
            raise CheckpointError(
                f"{weights.path} holds {what} with the numbers {written(sorted(of_stack))} alone, "
                "and they count from 0 without a gap; export the whole model again"
            )
    return [_stack(weights, number, len(layers[number])) for number in sorted(layers)]


def _stack(weights: Weights, number: int, num_layers: int) -> _Stack:
    start = f"encoder.encoders.{number}"
    averages = f"{start}.downsample.bias"
    downsampling = dims_of(weights, averages, 1)[0] if averages in weights else 1
    layer = f"{start}.encoder.layers.0" if averages in weights else f"{start}.layers.0"
    positions, pos_dim = dims_of(weights, f"{layer}.self_attn_weights.linear_pos.weight", 2)
    queries, dim = dims_of(weights, f"{layer}.self_attn_weights.in_proj.weight", 2)
    values = dims_of(weights, f"{layer}.self_attn1.in_proj.weight", 2)[0]
    if queries <= positions or (queries - positions) % 2:
        raise CheckpointError(
            f"{weights.path}: {layer}.self_attn_weights.in_proj.weight has {queries} rows, which "
            f"are no queries and keys beside {positions} positions; take all tensors from one "
            "training"
        )
    first, second, third = (
        dims_of(weights, f"{layer}.feed_forward{part}.in_proj.weight", 2)[0] for part in (1, 2, 3)
    )
    kernel = dims_of(weights, f"{layer}.conv_module1.depthwise_conv.chunkwise_conv.weight", 3)[2]
    products = (queries - positions) // 2, positions, values
    return _Stack(num_layers, downsampling, dim, products, (first, second, third), kernel, pos_dim)


def _check_output(weights: Weights) -> None:
    """The encoder's frames are at 25 Hz, and what it reads has the served number of mel bins."""
    rate = weights.shape_of("encoder.downsample_output.bias")
    if rate != (2,):
        raise CheckpointError(
            f"{weights.path}: encoder.downsample_output.bias is of shape {rate}, and this backend "
            "serves output_downsampling_factor=2, an encoder frame each 40 ms; give such a model"
        )
    columns = dims_of(weights, "encoder_embed.out.weight", 2)[1]
    channels = _conv_channels(weights)[-1]
    if columns != _MEL_COLUMNS * channels:
        raise CheckpointError(
            f"{weights.path}: encoder_embed.out.weight reads {columns / channels:g} mel columns of "
            f"{channels} channels, and features of {_MEL_BINS} mel bins give {_MEL_COLUMNS}; give "
            f"a model trained with feature_dim={_MEL_BINS}"
        )


def _conv_channels(weights: Weights) -> tuple[int, int, int]:
    first, second, third = (
        dims_of(weights, f"encoder_embed.conv.{place}.weight", 4)[0] for place in (0, 4, 7)
    )
    return first, second, third


def _num_heads(stacks: list[_Stack], weights: Weights, arguments: Arguments) -> tuple[int, ...]:
    """Of each stack. Logs where they come from."""
    said = arguments.numbers("num_heads", len(stacks))
    if said is not None:
        heads, source = said.value, str(said.source)
        if min(heads) < 1:
            raise CheckpointError(
                f"{said.source}: num_heads={written(heads)}; every stack has 1 or more"
            )
    else:
        heads, source = _usual_heads(stacks, weights, arguments), "usual_head_sizes"
    logger.info("event=icefall_num_heads num_heads=%s source=%s", written(heads), source)
    return tuple(heads)


def _usual_heads(stacks: list[_Stack], weights: Weights, arguments: Arguments) -> tuple[int, ...]:
    """As many as the usual sizes of a head make of the products, where all three agree."""
    sizes = []
    for name, usual in _USUAL_SIZES.items():
        said = arguments.numbers(name, len(stacks))
        sizes.append((usual,) * len(stacks) if said is None else said.value)
    heads = []
    for number, stack in enumerate(stacks):
        parts = list(zip(stack.products, (size[number] for size in sizes), strict=True))
        found = {product / size if size > 0 else 0.0 for product, size in parts}
        one = found.pop()
        if found or one < 1 or one % 1:
            raise CheckpointError(
                f"{weights.path} does not say num_heads, and the shapes of stack {number} leave it "
                f"open: {_ratios(parts)} heads by the usual sizes of a head; write num_heads of "
                f'the training into {arguments.path}, such as {{"num_heads": "4,4,4,8,4,4"}}'
            )
        heads.append(int(one))
    return tuple(heads)


def _ratios(parts: list[tuple[int, int]]) -> str:
    return ", ".join(f"{product}/{size}" for product, size in parts)


def _config(
    number: int, stack: _Stack, num_heads: int, weights: Weights, arguments: Arguments
) -> StackConfig:
    rest = [product % num_heads for product in stack.products]
    if any(rest):
        raise CheckpointError(
            f"{arguments.path}: num_heads={num_heads} of stack {number} does not divide what "
            f"{weights.path} has for its queries, positions and values: "
            f"{written(stack.products)}; take both from one training, or correct it"
        )
    query, position, value = (product // num_heads for product in stack.products)
    try:
        return StackConfig(
            num_layers=stack.num_layers,
            downsampling=stack.downsampling,
            dim=stack.dim,
            num_heads=num_heads,
            query_head_dim=query,
            position_head_dim=position,
            value_head_dim=value,
            feed_forward_dims=stack.feed_forward_dims,
            conv_kernel_size=stack.kernel_size,
        )
    except ConfigError as error:
        raise CheckpointError(f"{weights.path}: stack {number}: {error}") from error


def _check_arguments(
    stacks: list[_Stack],
    configs: tuple[StackConfig, ...],
    weights: Weights,
    arguments: Arguments,
) -> None:
    sizes = {
        "num_encoder_layers": [stack.num_layers for stack in stacks],
        "downsampling_factor": [stack.downsampling for stack in stacks],
        "encoder_dim": [stack.dim for stack in stacks],
        "feedforward_dim": [stack.feed_forward_dims[1] for stack in stacks],
        "cnn_module_kernel": [stack.kernel_size for stack in stacks],
        "query_head_dim": [config.query_head_dim for config in configs],
        "pos_head_dim": [config.position_head_dim for config in configs],
        "value_head_dim": [config.value_head_dim for config in configs],
    }
    for name, of_stacks in sizes.items():
        check_said(arguments, name, tuple(of_stacks), weights)
    check_said(arguments, "pos_dim", (stacks[0].pos_dim,), weights)
