"""The PyPI package `zipformer` as a recogniser: its model, its states, its greedy searches.

    pip install --no-deps zipformer==0.1.3

Only its model and its searches are imported. What its training and its command line need beside
them is not installed with --no-deps, and is stood in for while it is imported.

Shapes: T feature frames, F features a frame.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.packages import MissingPackageError

VERSION = "0.1.3"
_REMEDY = f"pip install --no-deps zipformer=={VERSION}"
#: Imported at the top of the package's modules, and called by none of its models and searches.
_UNUSED = ("atdataset", "kaldialign", "kaldifst", "torch.utils.tensorboard")
_PADDING = math.log(1e-10)
#: Frames of padding that icefall's streaming decoder appends beside those that a window needs.
_TAIL_FRAMES = 30
_OPTIONS = (
    "num_encoder_layers", "downsampling_factor", "feedforward_dim", "num_heads", "encoder_dim",
    "query_head_dim", "value_head_dim", "pos_head_dim", "pos_dim", "cnn_module_kernel",
    "decoder_dim", "joiner_dim", "context_size", "use_transducer", "use_ctc", "causal",
)  # fmt: skip


class PackageRecogniser:
    """One stream at a time, chunk by chunk, as the package's own streaming inference does it.

    That inference runs a model which TorchScript has compiled; `is_scripted` False spares the time.
    """

    def __init__(
        self, checkpoint: Path, *, chunk_size: int, left_frames: int, is_scripted: bool = True
    ) -> None:
        """`left_frames` of 20 ms. Raises MissingPackageError where the package is not installed."""
        self._is_scripted = is_scripted
        with warnings.catch_warnings():
            # PyTorch warns of the age of parts that the package is built with.
            warnings.simplefilter("ignore")
            self._open(checkpoint, chunk_size, left_frames)

    def _open(self, checkpoint: Path, chunk_size: int, left_frames: int) -> None:
        self._package = _import_package()
        options = json.loads((checkpoint / "train_args.json").read_text(encoding="utf-8"))
        weights = torch.load(checkpoint / "pretrained.pt", weights_only=True)["model"]
        self.has_transducer = bool(options["use_transducer"])
        self._context_size = int(options["context_size"]) if self.has_transducer else 1
        self._chunk_size = chunk_size
        self._model = self._build(options, weights, chunk_size, left_frames)
        # The search asks the model where it lies.
        self._model.device = torch.device("cpu")

    @torch.inference_mode()
    def tokens(self, features_TF: Tensor) -> list[int]:
        """What a whole stream of features says."""
        window = 2 * self._chunk_size + 13
        stream = self._start(features_TF)
        states = self._model.encoder.get_init_states()
        lengths = torch.tensor([window], dtype=torch.int32)
        while not stream.done:
            frames_TF, length = stream.get_feature_frames(2 * self._chunk_size)
            frames_TF = functional.pad(frames_TF, (0, 0, 0, window - length), value=_PADDING)
            encoded, encoded_lengths, states = self._model.encoder(frames_TF[None], lengths, states)
            self._search(stream, encoded, encoded_lengths)
        return list(stream.hyp[self._context_size :] if self.has_transducer else stream.hyp)

    def _start(self, features_TF: Tensor) -> Any:
        params = self._package.utils.AttributeDict(
            blank_id=0, context_size=self._context_size, decoding_method="greedy_search"
        )
        stream = self._package.stream.DecodeStream(params, "", [], pad_length=13)
        # As in training; the class starts with blanks alone, which gives other tokens.
        stream.hyp = [-1] * (self._context_size - 1) + [0] if self.has_transducer else []
        stream.set_features(functional.pad(features_TF, (0, 0, 0, _TAIL_FRAMES), value=_PADDING))
        return stream

    def _search(self, stream: Any, encoded: Tensor, lengths: Tensor) -> None:
        search = self._package.search
        if self.has_transducer:
            projected = self._model.joiner.encoder_proj(encoded)
            search.streaming_greedy_search(self._model, projected, [stream])
        else:
            search.streaming_ctc_greedy_search(self._model, encoded, lengths, [stream])

    def _build(
        self, options: dict[str, Any], weights: dict[str, Tensor], chunk_size: int, left_frames: int
    ) -> Any:
        module = self._package.model
        model = module.AsrModel(
            **{name: options[name] for name in _OPTIONS if name in options},
            encoder_unmasked_dim=options["encoder_dim"],
            chunk_size=str(chunk_size),
            left_context_frames=str(left_frames),
            vocab_size=_vocab_size(weights),
        )
        model.load_state_dict(weights)
        model.eval()
        model.encoder = module.StreamingEncoderWrapper(model.encoder, model.encoder_embed)
        if not self._is_scripted:
            return model
        # Its forward pass is for training.
        type(model).forward = torch.jit.ignore(type(model).forward)
        return torch.jit.script(model)


class _Package:
    """The modules of the package that are used here."""

    def __init__(self) -> None:
        self.model: Any = importlib.import_module("zipformer.modules.model")
        self.search: Any = importlib.import_module("zipformer.decode.search")
        self.stream: Any = importlib.import_module("zipformer.decode.stream")
        self.utils: Any = importlib.import_module("zipformer.utils")


class _StandIn(ModuleType):
    """A module whose every name is a class without use."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _vocab_size(weights: dict[str, Tensor]) -> int:
    names = ("joiner.output_linear.weight", "ctc_output.1.weight")
    return next(weights[name].shape[0] for name in names if name in weights)


@functools.cache
def _import_package() -> _Package:
    spec = importlib.util.find_spec("zipformer")
    if spec is None or spec.submodule_search_locations is None:
        raise MissingPackageError(
            f"the comparison needs the package zipformer, which is not installed; {_REMEDY}"
        )
    # Without what its own __init__ imports: the command line.
    bare = ModuleType("zipformer")
    bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules["zipformer"] = bare
    with _standing_in(_UNUSED):
        return _Package()


@contextlib.contextmanager
def _standing_in(names: tuple[str, ...]) -> Iterator[None]:
    missing = [name for name in names if not _is_installed(name)]
    for name in missing:
        sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _is_installed(name: str) -> bool:
    # PyTorch's part for tensorboard is there without tensorboard.
    package = name.rpartition(".")[2]
    return importlib.util.find_spec(package) is not None
