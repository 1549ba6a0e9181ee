"""SentencePiece segmentation, for checkpoints that bring a bpe.model."""

from __future__ import annotations

from pathlib import Path

from oasr_backend.errors import CheckpointError


class PieceModel:
    """A SentencePiece model, for segmentation only: its ids aren't those of units.txt."""

    def __init__(self, path: str | Path) -> None:
        # Only checkpoints with a bpe.model need the library.
        from sentencepiece import SentencePieceProcessor

        if not Path(path).is_file():
            raise CheckpointError(f"SentencePiece model {path} is not a file; copy it or drop it")
        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"SentencePiece model {path} cannot be loaded ({error}); copy it again"
            ) from error

    def split(self, text: str) -> list[str]:
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return pieces
