"""The sources of audio: whole files, excerpts of files, files without a header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oasr_client.mono import SAMPLE_RATE_HZ


@dataclass(frozen=True)
class Excerpt:
    """`duration_s` from `offset_s` on, of one file; None means up to its end."""

    path: Path
    offset_s: float = 0.0
    duration_s: float | None = None

    def __str__(self) -> str:
        begin = f"{self.path} from {self.offset_s:.10g} s"
        if self.duration_s is None:
            return begin
        return f"{begin} to {self.offset_s + self.duration_s:.10g} s"

    @property
    def stem(self) -> str:
        """The name, without a suffix, of a file that tells of the source."""
        return f"{self.path.stem}_{self.offset_s:g}" if self.offset_s else self.path.stem


AudioSource = Path | Excerpt


@dataclass(frozen=True)
class RawFormat:
    """The format of a file without a header; `subtype` is libsndfile's name of the encoding."""

    subtype: str
    sample_rate_hz: int = SAMPLE_RATE_HZ
    channels: int = 1
