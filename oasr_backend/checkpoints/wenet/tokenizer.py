"""The tokenizer that `train.yaml` describes: every option is honoured or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oasr_backend.checkpoints.files import is_named
from oasr_backend.checkpoints.wenet.config import section
from oasr_backend.checkpoints.wenet.files import needed
from oasr_backend.errors import CheckpointError
from oasr_backend.text.tokenizer import UnitTokenizer, load_tokenizer

#: The others bring vocabularies and texts of their own, without a units.txt that says it all.
_KINDS = ("bpe", "char")
#: What exactly these values can be served of, most of them Whisper's and Paraformer's.
_ONLY: dict[str, tuple[object, ...]] = {
    "connect_symbol": ("", " ", None),
    "is_multilingual": (False, None),
    "num_languages": (1, None),
    "seg_dict_path": (None,),
}
#: The symbol table is `units.txt` wherever training had it, and no text is split any more.
_FREE = {
    "bpe_path", "non_lang_syms_path", "special_tokens", "split_with_space", "symbol_table_path",
    "unk",
}  # fmt: skip


def read_tokenizer(units_path: Path, config: Mapping[str, Any]) -> UnitTokenizer:
    """The units beside which the files of `tokenizer_conf` lie.

    Raises CheckpointError naming the first option that cannot be honoured, or the file that is not
    there.
    """
    options = section(config, "tokenizer_conf")
    _check(config.get("tokenizer"), options)
    return load_tokenizer(
        units_path,
        _bpe_model(units_path.parent, options),
        silent=_silent(units_path.parent, options),
        connect_symbol=options.get("connect_symbol") or "",
    )


def _check(kind: object, options: Mapping[str, Any]) -> None:
    if kind not in (None, *_KINDS):
        raise _refuse("tokenizer", kind, " or ".join(_KINDS))
    for name in sorted(set(options) - set(_ONLY) - _FREE, key=str):
        raise CheckpointError(
            f"train.yaml: tokenizer_conf.{name}={options[name]!r} is unknown to this backend; "
            "remove it if it does not change the text"
        )
    for name, served in _ONLY.items():
        if options.get(name) not in served:
            known = " or ".join(repr(value) for value in served if value is not None) or "null"
            raise _refuse(f"tokenizer_conf.{name}", options[name], known)


def _refuse(name: str, value: object, served: str) -> CheckpointError:
    return CheckpointError(
        f"train.yaml: {name}={value!r} cannot be served; this backend serves {name}={served}. "
        "Export a checkpoint trained that way."
    )


def _bpe_model(directory: Path, options: Mapping[str, Any]) -> Path | None:
    name = options.get("bpe_path")
    path = directory / Path(str(name)).name if name else directory / "bpe.model"
    return needed(directory, path.name) if is_named(path) else None


def _silent(directory: Path, options: Mapping[str, Any]) -> set[str]:
    """Symbols that are no part of the text: special ones, and sounds that are not speech."""
    special = map(str, section(options, "special_tokens"))
    unknown = [str(options["unk"])] if options.get("unk") else []
    return {*special, *unknown, *_non_language(directory, options.get("non_lang_syms_path"))}


def _non_language(directory: Path, name: object) -> list[str]:
    if not name:
        return []
    # Training machines write absolute paths; the file travels beside the weights.
    path = directory / Path(str(name)).name
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"tokenizer_conf.non_lang_syms_path: {path} cannot be read ({error}); copy the file "
            "there, or set the option to null if no unit stands for a sound that is not speech"
        ) from error
