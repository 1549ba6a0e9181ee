"""What a checkpoint is to the server, and what a reader of one toolkit's checkpoints provides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from oasr_backend.decoders.base import SearchKind
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.errors import CheckpointError
from oasr_backend.features import FrameGeometry
from oasr_backend.models import AcousticModel, ChunkedSpec, CtcHead
from oasr_backend.models.rescoring import RescoringDecoder
from oasr_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint before its weights are read.

    encoder     what it reads and keeps under any settings; an EncoderSpec, or what makes one
    searches    what can decode it, by the name that a stream asks for; the first is the default
    vocab_size  units that it tells apart; None where only the weights say it
    tokenizer   of its units, where they are read before the weights

    Raises CheckpointError for no searches, and for one under another name than its own.
    """

    encoder: ChunkedSpec
    frames: FrameGeometry
    searches: Mapping[str, SearchKind]
    vocab_size: int | None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        check_searches(self.searches)


@dataclass(frozen=True)
class Checkpoint:
    """A model as it was trained: float32 weights on the CPU, not yet prepared for serving.

    Raises CheckpointError for searches as CheckpointInfo does, for one that reads a head that the
    model lacks, for a CTC head that takes other frames than the encoder gives or has another
    number of outputs than the tokenizer has units, and for a blank that is none of its outputs.
    """

    model: AcousticModel
    tokenizer: Tokenizer
    searches: Mapping[str, SearchKind]
    second_pass: RescoringDecoder | NoDecoder = field(default_factory=NoDecoder)
    blank_id: int = 0

    def __post_init__(self) -> None:
        check_searches(self.searches)
        heads = self.model.heads
        for search in self.searches.values():
            if search.head not in heads:
                raise CheckpointError(
                    f"the search {search.name!r} reads the head {search.head!r}, and the model has "
                    f"{', '.join(heads)}; name the searches that fit the model"
                )
        for head in heads.values():
            if isinstance(head, CtcHead):
                self._check_ctc(head)

    def _check_ctc(self, head: CtcHead) -> None:
        if head.vocab_size != self.tokenizer.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {self.tokenizer.vocab_size} units, but the CTC head has "
                f"{head.vocab_size} outputs; take both from one training"
            )
        if head.model_dim != self.model.spec.model_dim:
            raise CheckpointError(
                f"the CTC head takes frames of width {head.model_dim}, but the encoder declares "
                f"model_dim={self.model.spec.model_dim}; give both one width"
            )
        for owner, blank_id in (("checkpoint", self.blank_id), ("CTC head", head.blank_id)):
            if blank_id not in range(head.vocab_size):
                raise CheckpointError(
                    f"the {owner} has blank_id={blank_id}, outside 0 .. {head.vocab_size - 1}, "
                    "the outputs of the CTC head; give the blank's place among them"
                )


def check_searches(searches: Mapping[str, SearchKind]) -> None:
    """Raises CheckpointError for no searches, and for one under another name than its own."""
    if not isinstance(searches, Mapping) or not searches:
        raise CheckpointError(
            f"the checkpoint has searches={searches!r}; give one SearchKind or more, each by its "
            "name, the default first"
        )
    for name, search in searches.items():
        if not isinstance(search, SearchKind):
            raise CheckpointError(f"the search {name!r} is {search!r}; give a SearchKind")
        if name != search.name:
            raise CheckpointError(
                f"searches has {search.name!r} under the name {name!r}; use its own name for both"
            )


class OpenCheckpoint(Protocol):
    """A checkpoint of which every file but the weights has been read and checked."""

    @property
    def path(self) -> Path: ...

    @property
    def info(self) -> CheckpointInfo: ...

    def load(self) -> Checkpoint:
        """Reads the weights. Raises CheckpointError for what cannot be honoured, by its name."""
        ...


class Reader(Protocol):
    """Reads the checkpoints of one toolkit.

    Installed packages give further readers: an entry point of the group "oasr_backend.readers"
    names a class, or another callable without arguments, that makes one.
    """

    @property
    def name(self) -> str:
        """The toolkit's, as messages call it."""
        ...

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files of such a checkpoint, for the message about one that no reader knows."""
        ...

    def recognises(self, path: Path) -> bool:
        """Whether the file or folder is such a checkpoint. Looks at names, and raises nothing."""
        ...

    def open(self, path: Path) -> OpenCheckpoint:
        """Reads and checks everything that is no weight.

        Raises CheckpointError naming the file or option that cannot be honoured.
        """
        ...
