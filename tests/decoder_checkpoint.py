"""The small golden checkpoint with an attention decoder of random weights, under WeNet's names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tests.conftest import GOLDEN_DIR
from tests.reference.attention_rescoring import ReferenceDecoder, ReferenceRescoring

MODEL_DIM, VOCAB_SIZE, NUM_HEADS, HIDDEN_DIM = 64, 96, 4, 80
REVERSE_WEIGHT = 0.3
UNIT = VOCAB_SIZE - 1


def write_checkpoint(
    directory: Path, kind: str = "bitransformer", *, seed: int = 0, **decoder_conf: Any
) -> Path:
    """`kind` is train.yaml's `decoder`; `decoder_conf` adds to what it says of the decoder."""
    shutil.copytree(GOLDEN_DIR / "wenet_small", directory)
    weights = torch.load(directory / "final.pt", weights_only=True)
    torch.save({**weights, **random_decoder(kind, seed=seed)}, directory / "final.pt")
    path = directory / "train.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["decoder"] = kind
    config["decoder_conf"] = {
        "attention_heads": NUM_HEADS,
        "linear_units": HIDDEN_DIM,
        "num_blocks": 2,
        "dropout_rate": 0.1,
        **({"r_num_blocks": 1} if kind == "bitransformer" else {}),
        **decoder_conf,
    }
    config["model_conf"] = {"ctc_weight": 0.3}
    if kind == "bitransformer":
        config["model_conf"]["reverse_weight"] = REVERSE_WEIGHT
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return directory


def random_decoder(kind: str, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    if kind == "transformer":
        _add_direction(weights, "decoder", 2, generator)
    else:
        _add_direction(weights, "decoder.left_decoder", 2, generator)
        _add_direction(weights, "decoder.right_decoder", 1, generator)
    return weights


def reference(kind: str, *, seed: int = 0) -> ReferenceRescoring:
    """The oracle of the same weights."""
    weights = random_decoder(kind, seed=seed)

    def direction(name: str) -> ReferenceDecoder:
        return ReferenceDecoder(weights, name, num_heads=NUM_HEADS, unit=UNIT)

    if kind == "transformer":
        return ReferenceRescoring(direction("decoder"))
    left, right = direction("decoder.left_decoder"), direction("decoder.right_decoder")
    return ReferenceRescoring(left, right, REVERSE_WEIGHT)


def _add_direction(
    weights: dict[str, Tensor], name: str, num_layers: int, generator: torch.Generator
) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(layer: str, out: int, width: int) -> None:
        weights[f"{name}.{layer}.weight"] = 2 * draw(out, width) / width**0.5
        weights[f"{name}.{layer}.bias"] = 0.2 * draw(out)

    def norm(layer: str) -> None:
        weights[f"{name}.{layer}.weight"] = 1 + 0.2 * draw(MODEL_DIM)
        weights[f"{name}.{layer}.bias"] = 0.2 * draw(MODEL_DIM)

    weights[f"{name}.embed.0.weight"] = 0.3 * draw(VOCAB_SIZE, MODEL_DIM)
    for index in range(num_layers):
        layer = f"decoders.{index}"
        for block in ("self_attn", "src_attn"):
            for part in ("q", "k", "v", "out"):
                linear(f"{layer}.{block}.linear_{part}", MODEL_DIM, MODEL_DIM)
        linear(f"{layer}.feed_forward.w_1", HIDDEN_DIM, MODEL_DIM)
        linear(f"{layer}.feed_forward.w_2", MODEL_DIM, HIDDEN_DIM)
        for number in (1, 2, 3):
            norm(f"{layer}.norm{number}")
    norm("after_norm")
    linear("output_layer", VOCAB_SIZE, MODEL_DIM)
