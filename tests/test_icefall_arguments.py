"""What is said beside an icefall model's weights: the arguments of its training, and its tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.models import ChunkSettings
from oasr_backend.models.transducer import JoinerHead
from oasr_backend.models.zipformer import ZipformerEncoder
from tests.conftest import GOLDEN_DIR
from tests.icefall_helpers import (
    BOTH,
    EPOCH,
    copy_icefall,
    edit_arguments,
    edit_state,
    edit_tokens,
    set_tensor,
)


def load(path: Path) -> Checkpoint:
    return open_checkpoint(path).load()


def heads_of(path: Path) -> list[int]:
    encoder = load(path).model.encoder
    assert isinstance(encoder, ZipformerEncoder)
    return [stack.num_heads for stack in encoder.config.stacks]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train_args.yaml", "num-heads: 4,4,4,8,4,4\ncausal: true\n"),
        ("train_args.yml", "num_heads: [4, 4, 4, 8, 4, 4]\nenv_info: {python: '3.8'}\n"),
        ("train_args.json", '{"--num-heads": "(4, 4, 4, 8, 4, 4)", "context_size": null}'),
    ],
)
def test_heads_may_be_written_in_any_usual_way(tmp_path: Path, name: str, content: str) -> None:
    directory = copy_icefall(tmp_path, BOTH)
    (directory / "train_args.json").unlink()
    (directory / name).write_text(content, encoding="utf-8")
    assert heads_of(directory) == [4, 4, 4, 8, 4, 4]


def test_one_number_serves_all_stacks(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_arguments(directory, num_heads=4)
    assert heads_of(directory) == [4, 4, 4]


def test_a_file_of_training_says_its_heads_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "oasr_backend"):
        assert heads_of(GOLDEN_DIR / EPOCH) == [4, 2, 4]
    assert f"num_heads=4,2,4 source={GOLDEN_DIR / EPOCH / 'epoch-30.pt'}" in caplog.text


def test_usual_sizes_of_a_head_say_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_icefall(tmp_path)
    (directory / "train_args.json").unlink()
    with caplog.at_level(logging.INFO, "oasr_backend"):
        assert heads_of(directory) == [4, 4, 4]
    assert "num_heads=4,4,4 source=usual_head_sizes" in caplog.text


def test_sizes_of_a_head_that_are_given_say_how_many(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path, BOTH)
    edit_arguments(directory, num_heads=None)
    assert heads_of(directory) == [4, 4, 4, 8, 4, 4]


@pytest.mark.parametrize("size", [1, 3])
def test_the_context_is_that_of_the_weights(tmp_path: Path, size: int) -> None:
    directory = copy_icefall(tmp_path, BOTH)
    edit_arguments(directory, context_size=None)
    edit_state(directory, lambda state: state.pop("decoder.conv.weight"))
    if size > 1:
        set_tensor(directory, "decoder.conv.weight", torch.randn(48, 4, size))
    head = load(directory).model.heads["joiner"]
    assert isinstance(head, JoinerHead)
    assert head.transducer.context_size == size


def test_chunks_outside_of_training_are_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    encoder = open_checkpoint(GOLDEN_DIR / EPOCH).info.encoder
    with caplog.at_level(logging.WARNING, "oasr_backend"):
        encoder.under(ChunkSettings(chunk_size=16, num_left_chunks=8))
        assert caplog.messages == []
        encoder.under(ChunkSettings(chunk_size=8, num_left_chunks=4))
    size, left = caplog.messages
    assert "chunk_size=8, and the model was trained with 16 or 32 or 64 frames" in size
    assert "chunk_size * num_left_chunks=32, and" in left


def test_symbols_of_a_lexicon_are_no_tokens(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_tokens(directory, lambda lines: [*lines, "#0 60", "#1 61"])
    assert load(directory).tokenizer.vocab_size == 60


def test_tokens_make_the_text(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    pieces = ["\u2581JA", "<0xE4>", "<0xBD>", "<0xA0>", "\u2581S", "O"]

    def put(lines: list[str]) -> list[str]:
        return [*lines[:3], *(f"{piece} {n}" for n, piece in enumerate(pieces, 3)), *lines[9:]]

    edit_tokens(directory, put)
    tokenizer = load(directory).tokenizer
    # <blk>, <sos/eos> and <unk> are silent.
    assert tokenizer.decode([0, 3, 2, 1, 7, 8]) == "JA SO"
    text, joint = tokenizer.joined([3, 4, 5])
    assert text == "JA"
    assert tokenizer.joined([6], joint)[0] == "\u4f60"


def test_the_blank_may_be_named_by_its_id_alone(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_tokens(directory, lambda lines: ["<b> 0", *lines[1:]])
    edit_arguments(directory, blank_id=0)
    assert load(directory).blank_id == 0


def test_the_blank_may_have_any_id(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    edit_tokens(directory, lambda lines: [*lines[1:-1], "<blk> 59", "Q 0"])
    checkpoint = load(directory)
    assert checkpoint.blank_id == 59


def test_tables_of_letters_beyond_ascii_are_no_byte_tables(tmp_path: Path) -> None:
    directory = copy_icefall(tmp_path)
    letters = ["\u2581\u0159e", "\u010d", "\u017e", "\u011b", "k", "ost", "a"]

    def put(lines: list[str]) -> list[str]:
        return [*lines[:3], *(f"{p} {n}" for n, p in enumerate(letters, 3)), *lines[10:]]

    edit_tokens(directory, put)
    assert load(directory).tokenizer.decode([3, 4]) == "\u0159e\u010d"
