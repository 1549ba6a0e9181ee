"""Writes a checkpoint in the form that sherpa-onnx's `OnlineRecognizer.from_wenet_ctc` reads.

The weights are those of the loaded model. What the library reads: six inputs in a fixed order
(`DenseModel.forward`), seven numbers of the metadata, and a table of the units. The int8 model is
made as WeNet users make theirs, by onnxruntime's dynamic quantisation of the matrix products.

In sherpa-onnx a stream starts at an `offset` of the whole history, with that history masked. The
graph looks a key's position up at `offset - history`, so that the first frame stands at position 0
as in the served model.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.peers.dense_model import NUM_POSITIONS, DenseModel
from benchmarks.peers.packages import require
from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.models.conformer import ConformerEncoder

_OPSET = 17
_INPUTS = ("x", "offset", "required_cache_size", "attn_cache", "conv_cache", "attn_mask")
_OUTPUTS = ("log_probs", "next_att_cache", "next_conv_cache")


@dataclass(frozen=True)
class ExportedModel:
    """The files of one export; `chunk_size` and `num_left_chunks` are fixed by it."""

    fp32: Path
    int8: Path
    tokens: Path
    chunk_size: int
    num_left_chunks: int

    def models(self) -> dict[str, Path]:
        """By the names that tables and results give them."""
        return {"sherpa-onnx fp32": self.fp32, "sherpa-onnx int8": self.int8}


def export_checkpoint(
    checkpoint: Path, folder: Path, *, chunk_size: int = 16, num_left_chunks: int = 4
) -> ExportedModel:
    """Writes model.onnx, model.int8.onnx and tokens.txt into `folder`.

    Raises CheckpointError for a checkpoint that cannot be read, ValueError for an encoder that
    this graph does not hold, and MissingPackageError without onnx and onnxruntime.
    """
    exported = ExportedModel(
        fp32=folder / "model.onnx",
        int8=folder / "model.int8.onnx",
        tokens=folder / "tokens.txt",
        chunk_size=chunk_size,
        num_left_chunks=num_left_chunks,
    )
    loaded = open_checkpoint(checkpoint).load()
    loaded.model.prepare(
        device=torch.device("cpu"), dtype=torch.float32, num_positions=NUM_POSITIONS
    )
    if not isinstance(loaded.model.encoder, ConformerEncoder):
        raise ValueError(
            f"{checkpoint} holds a {type(loaded.model.encoder).__name__}; give a checkpoint with "
            "WeNet's Conformer"
        )
    _write_fp32(loaded, exported)
    _write_int8(exported)
    _write_tokens(loaded, exported.tokens)
    return exported


def first_state(loaded: Checkpoint, *, num_history: int) -> tuple[Tensor, Tensor]:
    """`attn_cache` and `conv_cache` of a stream that begins."""
    sizes = cast(ConformerEncoder, loaded.model.encoder).config
    attn_cache = torch.zeros(sizes.num_layers, sizes.num_heads, num_history, 2 * sizes.head_dim)
    conv_cache = torch.zeros(sizes.num_layers, 1, sizes.model_dim, sizes.conv_kernel_size - 1)
    return attn_cache, conv_cache


def _write_fp32(loaded: Checkpoint, exported: ExportedModel) -> None:
    num_history = exported.chunk_size * exported.num_left_chunks
    spec = loaded.model.spec
    num_mel_bins = cast(ConformerEncoder, loaded.model.encoder).config.num_mel_bins
    window_frames = (
        (exported.chunk_size - 1) * spec.subsampling_rate + spec.right_context_frames + 1
    )
    dense = DenseModel(loaded.model, num_history=num_history, num_mel_bins=num_mel_bins).eval()
    arguments = (
        torch.zeros(1, window_frames, num_mel_bins),
        torch.tensor([num_history]),
        torch.tensor([num_history]),
        *first_state(loaded, num_history=num_history),
        torch.ones(1, 1, num_history + exported.chunk_size, dtype=torch.bool),
    )
    with warnings.catch_warnings(), torch.no_grad():
        # The exporter without further packages calls itself deprecated, and shapes constant.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            dense,
            arguments,
            exported.fp32,
            input_names=list(_INPUTS),
            output_names=list(_OUTPUTS),
            opset_version=_OPSET,
            dynamo=False,
        )
    _add_metadata(exported.fp32, _metadata(loaded, exported))


def _metadata(loaded: Checkpoint, exported: ExportedModel) -> dict[str, Any]:
    spec, sizes = loaded.model.spec, cast(ConformerEncoder, loaded.model.encoder).config
    return {
        "model_type": "wenet_ctc",
        "version": 1,
        "chunk_size": exported.chunk_size,
        "left_chunks": exported.num_left_chunks,
        "head": sizes.num_heads,
        "num_blocks": sizes.num_layers,
        "output_size": sizes.model_dim,
        "cnn_module_kernel": sizes.conv_kernel_size,
        "right_context": spec.right_context_frames,
        "subsampling_factor": spec.subsampling_rate,
        "vocab_size": loaded.tokenizer.vocab_size,
    }


def _add_metadata(path: Path, metadata: dict[str, Any]) -> None:
    onnx = require("onnx")
    model = onnx.load(str(path))
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, str(value)
    onnx.save(model, str(path))


def _write_int8(exported: ExportedModel) -> None:
    quantization = require("onnxruntime.quantization")
    # It advises to prepare the graph first, which only static quantisation needs.
    logging.disable(logging.WARNING)
    try:
        quantization.quantize_dynamic(
            model_input=str(exported.fp32),
            model_output=str(exported.int8),
            op_types_to_quantize=["MatMul"],
            weight_type=quantization.QuantType.QInt8,
        )
    finally:
        logging.disable(logging.NOTSET)


def _write_tokens(loaded: Checkpoint, path: Path) -> None:
    """A line `symbol id` for each unit."""
    units = loaded.tokenizer
    lines = (f"{units.symbol_of(index)} {index}\n" for index in range(units.vocab_size))
    path.write_text("".join(lines), encoding="utf-8")
