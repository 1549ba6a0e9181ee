"""Options of train.yaml's tokenizer: each is honoured in the text or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasr_backend.checkpoints import open_checkpoint
from oasr_backend.errors import CheckpointError
from oasr_backend.text.tokenizer import Tokenizer
from tests.conftest import GOLDEN_DIR

GOLDEN = GOLDEN_DIR / "wenet_small"


def tokenizer_with(directory: Path, *, kind: str = "char", **options: Any) -> Tokenizer:
    """The tokenizer of a checkpoint whose train.yaml has these options."""
    shutil.copytree(GOLDEN, directory, dirs_exist_ok=True)
    config = yaml.safe_load((GOLDEN / "train.yaml").read_text(encoding="utf-8"))
    config |= {"tokenizer": kind, "tokenizer_conf": options}
    (directory / "train.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return open_checkpoint(directory).load().tokenizer


def test_a_connect_symbol_stands_between_the_units(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, connect_symbol="").decode([2, 4, 5]) == "caeafa"
    assert tokenizer_with(tmp_path, connect_symbol=" ").decode([2, 4, 5]) == "ca ea fa"


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_options_as_training_writes_them_change_nothing(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_with(
        tmp_path,
        kind=kind,
        symbol_table_path="data/dict/lang_char.txt",
        split_with_space=False,
        bpe_path=None,
        non_lang_syms_path=None,
        is_multilingual=False,
        num_languages=1,
        special_tokens={"<blank>": 0, "<unk>": 1, "<sos>": 95, "<eos>": 95},
    )
    assert tokenizer.decode([3, 2, 1, 4, 95]) == "dacaea"


def test_special_and_unknown_symbols_of_any_form_are_left_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, unk="ca", special_tokens={"ea": 4})
    assert tokenizer.decode([2, 5, 4]) == "fa"


def test_sounds_that_are_no_language_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "non_lang.txt").write_text("{NOISE}\nea\n", encoding="utf-8")
    tokenizer = tokenizer_with(tmp_path, non_lang_syms_path="/train/data/non_lang.txt")
    assert tokenizer.decode([2, 4, 5]) == "cafa"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "whisper"}, ["tokenizer='whisper'", "bpe or char"]),
        ({"kind": "paraformer"}, ["tokenizer='paraformer'"]),
        ({"kind": "huggingface"}, ["tokenizer='huggingface'"]),
        ({"connect_symbol": "@"}, ["tokenizer_conf.connect_symbol='@'", "'' or ' '"]),
        ({"is_multilingual": True}, ["tokenizer_conf.is_multilingual=True", "False"]),
        ({"num_languages": 99}, ["tokenizer_conf.num_languages=99", "=1"]),
        ({"seg_dict_path": "seg_dict"}, ["tokenizer_conf.seg_dict_path='seg_dict'", "null"]),
        ({"upper_case": True}, ["tokenizer_conf.upper_case=True is unknown"]),
        ({"non_lang_syms_path": "a/gone.txt"}, ["non_lang_syms_path", "gone.txt", "copy the file"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        tokenizer_with(tmp_path, **options)
    for word in words:
        assert word in str(refusal.value)
