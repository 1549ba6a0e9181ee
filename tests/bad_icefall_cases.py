"""Copies of golden Zipformers, each spoilt in one way, and what its refusal tells."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.icefall_helpers import (
    BOTH,
    CTC,
    EPOCH,
    LAYER,
    LOWER_LAYER,
    drop,
    edit_arguments,
    edit_state,
    edit_tokens,
    renamed,
    set_tensor,
    weights_of,
)


class Bad(NamedTuple):
    """How a copy of a golden is spoilt, and words of its refusal."""

    told: tuple[str, ...]
    spoil: Callable[[Path], object]
    golden: str = CTC


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def save(content: Any) -> Callable[[Path], object]:
    return lambda directory: torch.save(content, weights_of(directory))


def tensor(name: str, *shape: int) -> Callable[[Path], object]:
    return lambda directory: set_tensor(directory, name, torch.zeros(shape))


def arguments(**values: Any) -> Callable[[Path], object]:
    return lambda directory: edit_arguments(directory, **values)


def lose(*starts: str) -> Callable[[Path], object]:
    return lambda directory: drop(directory, *starts)


def tokens(edit: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    return lambda directory: edit_tokens(directory, edit)


def cut(directory: Path) -> None:
    path = weights_of(directory)
    path.write_bytes(path.read_bytes()[:100_000])


def trace(directory: Path) -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    torch.jit.save(traced, weights_of(directory))


def copy_weights(directory: Path) -> None:
    shutil.copy(directory / "epoch-30.pt", directory / "epoch-9.pt")


def write_yaml(directory: Path) -> None:
    (directory / "train_args.yaml").write_text("num_heads: 4\n")


def write_latin(directory: Path) -> None:
    (directory / "tokens.txt").write_bytes("<blk> 0\né 1\n".encode("latin-1"))


def mix_prefixes(directory: Path) -> None:
    edit_state(directory, lambda s: s.update({"module.x": s.pop("ctc_output.1.bias")}))


def spoil_value(directory: Path) -> None:
    edit_state(directory, lambda s: s["encoder_embed.out.weight"].fill_(float("nan")))


def quantise(directory: Path) -> None:
    name = "encoder_embed.out.weight"
    edit_state(directory, lambda s: s.update({name: s[name].to(torch.int8)}))


def lose_heads(directory: Path) -> None:
    (directory / "train_args.json").unlink()


def lose_blank(directory: Path) -> None:
    edit_tokens(directory, lambda lines: ["<b> 0", *lines[1:]])
    edit_arguments(directory, blank_id=99)


def become_bytes(lines: list[str]) -> list[str]:
    """Pieces of letters that stand for bytes."""
    return [
        f"\u2581{chr(0x180 + n)}{chr(0x1A0 + n)} {n}" if n > 2 else line
        for n, line in enumerate(lines)
    ]


BAD: dict[str, Bad] = {
    # The files.
    "garbage": Bad(("cannot read", "no PyTorch state dict"), write("pretrained.pt", b"x" * 99)),
    "truncated": Bad(("(100000 bytes) is truncated", "copy it again"), cut),
    "lfs pointer": Bad(
        ("a Git LFS pointer", "git lfs pull"),
        write("pretrained.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    "lfs tokens": Bad(
        ("tokens.txt is a Git LFS pointer",),
        write("tokens.txt", b"version https://git-lfs.github.com/spec/v1\n"),
    ),
    "torchscript": Bad(("is a TorchScript archive", "give the state dict"), trace),
    "onnx": Bad(
        ("is an ONNX graph",), write("pretrained.pt", b"\x08\x08\x12\x07pytorch\x1a\x031.7")
    ),
    "ncnn": Bad(("is an ncnn graph",), write("pretrained.pt", b"7767517\n120 140\n")),
    "a list": Bad(("holds a list, no state dict",), save([1])),
    "no model": Bad(
        ("holds 'optimizer'", "'model' and 'model_avg'"), save({"optimizer": {"a": 1}})
    ),
    "an empty model": Bad(("'model' is empty", "export.py"), save({"model": {}})),
    "latin-1 tokens": Bad(("tokens.txt cannot be read", "give UTF-8"), write_latin),
    "a number as model": Bad(("holds int under 'model'",), save({"model": 3})),
    "no tensor": Bad(
        ("holds list under 'model', 'x'", "a tensor by its name"), save({"model": {"x": [1]}})
    ),
    "two prefixes": Bad(("names 'module.x' with the prefix 'module.'",), mix_prefixes),
    "several epochs": Bad(
        ("holds epoch-9.pt, epoch-30.pt and no pretrained.pt", "checkpoint/epoch-30.pt, or export"),
        copy_weights,
        EPOCH,
    ),
    "no average": Bad(
        ("set use_averaged_model", "holds no 'model_avg'"), arguments(use_averaged_model=True)
    ),
    # Other recipes.
    "lora": Bad(
        ("in_proj.lora_A'", "LoRA", "merge it"),
        tensor(f"{LAYER}.self_attn1.in_proj.lora_A", 4, 48),
    ),
    "adapters": Bad(("adapters", "merge it"), tensor(f"{LAYER}.adapter.down.weight", 4, 48)),
    "older zipformer": Bad(
        ("pruned_transducer_stateless7",),
        lambda d: renamed(d, "encoder_embed.", "encoder.encoder_embed."),
    ),
    "emformer": Bad(
        ("is an Emformer",), save({"model": {"encoder.encoder.emformer_layers.0.w": torch.ones(2)}})
    ),
    "lstm": Bad(
        ("an LSTM encoder",),
        save({"model": {"encoder.encoder.layers.0.lstm.weight_ih_l0": torch.ones(2)}}),
    ),
    "conformer": Bad(
        ("is a Conformer",),
        save({"model": {"encoder.encoder.layers.0.self_attn.pos_bias_u": torch.ones(2)}}),
    ),
    "whisper": Bad(
        ("a Whisper encoder",), save({"model": {"encoder.blocks.0.attn.weight": torch.ones(2)}})
    ),
    "wenet": Bad(("is a WeNet model",), save({"model": {"ctc.ctc_lo.weight": torch.ones(2)}})),
    "rnn predictor": Bad(
        ("a predictor with an RNN",), tensor("decoder.rnn.weight_ih_l0", 4, 4), BOTH
    ),
    "not causal": Bad(
        ("depthwise_conv.weight'", "trained with --causal 0, cannot stream", "--causal 1"),
        lambda d: renamed(d, "depthwise_conv.chunkwise_conv.", "depthwise_conv."),
    ),
    "no zipformer": Bad(
        ("nothing under 'encoder.encoders.'",), save({"model": {"linear.weight": torch.ones(2)}})
    ),
    # Arguments that no shape shows.
    "causal told false": Bad(
        ("causal=False", "trained with --causal 0, cannot stream"), arguments(causal=0)
    ),
    "whisper features": Bad(("feature='whisper'", "feature=fbank"), arguments(feature="whisper")),
    "40 bins": Bad(("feature_dim=40", "serves feature_dim=80"), arguments(feature_dim=40)),
    "8 kHz": Bad(("sampling_rate=8000", "=16000"), arguments(sampling_rate=8000)),
    "no flag": Bad(("causal='maybe' is neither true nor false",), arguments(causal="maybe")),
    "broken json": Bad(("cannot read", "train_args.json"), write("train_args.json", b"{")),
    "a json list": Bad(("holds a list", "by their names"), write("train_args.json", b"[4]")),
    "nested": Bad(("model holds further names",), arguments(model={"num_heads": "4"})),
    "written twice": Bad(
        ("gives num_heads twice",), write("train_args.json", b'{"num_heads": 4, "num-heads": 4}')
    ),
    "two argument files": Bad(("train_args.json and train_args.yaml",), write_yaml),
    # Heads of attention.
    "heads unknown": Bad(
        ("does not say num_heads", "num_heads of the training into", "train_args.json"),
        lose_heads,
        BOTH,
    ),
    "heads that do not divide": Bad(
        ("num_heads=3 of stack 0 does not divide", "128,16,48"), arguments(num_heads=3)
    ),
    "too few heads": Bad(("num_heads=4,4 has 2 values", "3 stacks"), arguments(num_heads="4,4")),
    "no heads": Bad(
        ("num_heads=4,0,4; every stack has 1 or more",), arguments(num_heads=[4, 0, 4])
    ),
    "heads in words": Bad(("num_heads='four' is no whole number",), arguments(num_heads="four")),
    "heads that differ": Bad(
        ("num_heads=4,4,4, but", "was trained with 4,2,4"), arguments(num_heads="4,4,4"), EPOCH
    ),
    # Arguments that shapes contradict.
    "other widths": Bad(
        ("encoder_dim=48,64,64, but the weights", "48,64,56"), arguments(encoder_dim="48,64,64")
    ),
    "other kernels": Bad(
        ("cnn_module_kernel=31,31,31", "31,15,15"), arguments(cnn_module_kernel=31)
    ),
    "other head sizes": Bad(("query_head_dim=16,16,16", "32,32,32"), arguments(query_head_dim=16)),
    "other layers": Bad(
        ("num_encoder_layers=1,1,1", "1,2,1"), arguments(num_encoder_layers="1,1,1")
    ),
    "other positions": Bad(("pos_dim=48", "have 16"), arguments(pos_dim=48)),
    "other context": Bad(("context_size=1", "have 2"), arguments(context_size=1), BOTH),
    "other joiner": Bad(("joiner_dim=512", "have 40"), arguments(joiner_dim=512), BOTH),
    "other vocabulary": Bad(("vocab_size=59", "have 60"), arguments(vocab_size=59)),
    "a head too many": Bad(("use_ctc=False", "has that head"), arguments(use_ctc=False)),
    "a head too few": Bad(
        ("use_transducer=True", "has no such head"), arguments(use_transducer="1")
    ),
    # Tensors.
    "a missing tensor": Bad((f"has no tensor '{LAYER}.norm.bias'",), lose(f"{LAYER}.norm.bias")),
    "a missing layer": Bad(("layers of a stack with the numbers 1 alone",), lose(LOWER_LAYER)),
    "a missing stack": Bad(("stacks with the numbers 0,2 alone",), lose("encoder.encoders.1.")),
    "an unknown tensor": Bad(
        ("'encoder.encoders.0.extra' would be unused",), tensor("encoder.encoders.0.extra", 2)
    ),
    "another shape": Bad(
        (f"{LAYER}.norm.bias is of shape (7,)", "has to be of (48,)"),
        tensor(f"{LAYER}.norm.bias", 7),
    ),
    "other dimensions": Bad(
        ("linear_pos.weight is of shape (16,), and", "2 sizes"),
        tensor(f"{LAYER}.self_attn_weights.linear_pos.weight", 16),
    ),
    "no queries": Bad(
        ("in_proj.weight has 16 rows",), tensor(f"{LAYER}.self_attn_weights.in_proj.weight", 16, 48)
    ),
    "an even kernel": Bad(
        ("conv_kernel_size=30 is even",),
        tensor(f"{LAYER}.conv_module1.depthwise_conv.chunkwise_conv.weight", 48, 1, 30),
    ),
    "12.5 Hz": Bad(
        ("downsample_output.bias is of shape (4,)", "output_downsampling_factor=2"),
        tensor("encoder.downsample_output.bias", 4),
    ),
    "40 bins in shapes": Bad(
        ("reads 9 mel columns of 16 channels", "feature_dim=80"),
        tensor("encoder_embed.out.weight", 48, 144),
    ),
    "not finite": Bad(("not finite", "'encoder_embed.out.weight'"), spoil_value),
    "quantised": Bad(("torch.int8", "before it was quantised"), quantise),
    "no head": Bad(("neither 'ctc_output.1.weight' nor 'joiner.*'",), lose("ctc_output.")),
    "no predictor": Bad(("has no tensor 'decoder.embedding.weight'",), lose("decoder."), BOTH),
    "groups of another size": Bad(
        ("groups of 1 channels",), tensor("decoder.conv.weight", 48, 1, 2), BOTH
    ),
    # Tokens.
    "a token too few": Bad(("names 59 tokens", "has 60 outputs"), tokens(lambda lines: lines[:-1])),
    "a token too many": Bad(
        ("names 61 tokens", "60 outputs"),
        tokens(lambda lines: [*lines, "X 60", "#0 61"]),
        BOTH,
    ),
    "a gap of ids": Bad(("without a gap",), tokens(lambda lines: [*lines[:-1], "X 70"])),
    "no line": Bad(("every line must be 'symbol id'",), tokens(lambda lines: [*lines, "X"])),
    "no blank": Bad(
        ("has no token <blk>", "write blank_id"), tokens(lambda lines: ["<b> 0", *lines[1:]])
    ),
    "two blanks": Bad(
        ("names <blk> twice, with the ids 0 and 1",),
        tokens(lambda lines: [lines[0], "<blk> 1", *lines[2:]]),
    ),
    "another blank": Bad(("blank_id=1, but <blk> has id 0",), arguments(blank_id=1)),
    "a blank beyond": Bad(
        ("blank_id=99 is none of the ids 0 .. 59",),
        lose_blank,
    ),
    "bbpe by name": Bad(
        ("byte-level BPE (bbpe)",), arguments(bpe_model="data/lang_bbpe_500/bbpe.model")
    ),
    "bbpe by pieces": Bad(("byte-level BPE (bbpe)",), tokens(become_bytes)),
}
