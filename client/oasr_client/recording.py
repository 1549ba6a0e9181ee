"""Audio files, or excerpts of them, as blocks of mono samples at 16 kHz."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import soundfile

from oasr_client.errors import InvalidAudioError
from oasr_client.mono import SAMPLE_RATE_HZ, Channels, Converter, Mono, check_rate
from oasr_client.riff import missing_bytes, open_endless_wav
from oasr_client.sources import AudioSource, Excerpt, RawFormat

BLOCK_S = 1.0
#: So much is read and dropped before an excerpt, since an MP3 is exact only a while after a seek.
PREROLL_S = 1.0
#: Rounded times of a manifest may lie this far beyond the end.
ROUNDING_S = 0.1
#: The client refuses a larger file whose header says 0 samples.
MAX_EMPTY_BYTES = 4096
#: A stream's header may leave its length open; libsndfile then gives the largest number.
_MAX_FRAMES = 2**62


class _Sequential(soundfile.SoundFile):  # type: ignore[misc]
    """SoundFile would seek to its own position after a block, which harms an MP3's next block."""

    def seekable(self) -> bool:
        return False


class Recording:
    """An open source; a context manager whose `blocks` may be gone through once.

    Raises InvalidAudioError when it is opened and while it is read.
    """

    def __init__(self, source: AudioSource, raw: RawFormat | None = None) -> None:
        self._source = source
        self._excerpt = source if isinstance(source, Excerpt) else Excerpt(source)
        #: Warnings for the caller. The list is complete after the last block.
        self.warnings: list[str] = []
        self._open_files = contextlib.ExitStack()
        with self._told():
            self._file = self._opened(raw)
            self._rate_hz: int = self._file.samplerate
            self._begin = round(self._excerpt.offset_s * self._rate_hz)
            self._check_begin()

    @property
    def num_samples(self) -> int | None:
        """The number of samples at 16 kHz, where the header tells it."""
        num_frames = self._num_frames_asked()
        if self._file.frames < _MAX_FRAMES:
            num_frames = min(num_frames, self._file.frames - self._begin)
        if num_frames == _MAX_FRAMES:
            return None
        return round(num_frames * SAMPLE_RATE_HZ / self._rate_hz)

    def blocks(self) -> Iterator[Mono]:
        """Blocks of about a second, none of them empty."""
        with self._told():
            converter = Converter(self._rate_hz)
            num_read = 0
            for block_NC in self._frames():
                num_read += len(block_NC)
                yield from _if_any(converter.convert(block_NC))
            yield from _if_any(converter.finish())
        self._warn(num_read, has_cancelled=converter.has_cancelled)

    def close(self) -> None:
        self._open_files.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self, raw: RawFormat | None) -> Any:
        path = self._excerpt.path
        _check_plain(path)
        name = os.fsencode(path)
        if raw is not None:
            return self._open_files.enter_context(_open_raw(name, raw))
        file = self._open_files.enter_context(_Sequential(name))
        # The rate is checked before any sample is read, so that a false header costs no memory.
        check_rate(file.samplerate)
        num_missing = missing_bytes(name)
        if num_missing:
            self.warnings.append(
                f"its header says {num_missing} bytes more than the file has; check that the copy "
                "is complete"
            )
        return file if file.frames else self._beyond_header(name, file)

    def _beyond_header(self, name: bytes, file: Any) -> Any:
        """Opens a file whose header says 0 samples: it is empty, or samples follow the header."""
        endless = open_endless_wav(name)
        if endless is not None:
            self.warnings.append("its header says 0 samples; it is read up to its end")
            return self._open_files.enter_context(
                _Sequential(self._open_files.enter_context(endless))
            )
        num_bytes = os.path.getsize(name)
        if num_bytes > MAX_EMPTY_BYTES:
            raise InvalidAudioError(
                f"the header says 0 samples, and the file has {num_bytes} bytes; convert it to "
                "WAV or FLAC, or name its raw encoding"
            )
        return file

    def _check_begin(self) -> None:
        if self._begin and self._begin >= self._file.frames:
            raise InvalidAudioError(
                f"the file ends at {self._file.frames / self._rate_hz:g} s; correct the offset of "
                f"{self._excerpt.offset_s:g} s"
            )

    def _num_frames_asked(self) -> int:
        if self._excerpt.duration_s is None:
            return _MAX_FRAMES
        return round(self._excerpt.duration_s * self._rate_hz)

    def _frames(self) -> Iterator[Channels]:
        if self._begin:
            preroll = min(self._begin, round(PREROLL_S * self._rate_hz))
            self._file.seek(self._begin - preroll)
            self._file.read(preroll, dtype="float32")
        num_left = self._num_frames_asked()
        num_block = round(BLOCK_S * self._rate_hz)
        while num_left:
            size = min(num_block, num_left)
            block_NC = self._file.read(size, dtype="float32", always_2d=True)
            if not len(block_NC):
                return
            num_left -= len(block_NC)
            yield block_NC

    def _warn(self, num_read: int, *, has_cancelled: bool) -> None:
        if has_cancelled:
            self.warnings.append(
                "its channels cancel each other; one of them is heard where they do, check how it "
                "was recorded"
            )
        duration_s = self._excerpt.duration_s
        if duration_s is not None and num_read / self._rate_hz + ROUNDING_S < duration_s:
            self.warnings.append(
                f"ends {num_read / self._rate_hz:g} s behind the offset, not {duration_s:g} s; "
                "check the manifest"
            )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors name the source. A file that is open by then is closed where opening fails."""
        try:
            yield
        except InvalidAudioError as error:
            self.close()
            raise InvalidAudioError(f"{self._source}: {error}") from error
        except (soundfile.SoundFileError, OSError, TypeError, ValueError) as error:
            self.close()
            raise InvalidAudioError(
                f"{self._source}: not readable as audio ({error}); convert it to WAV or FLAC, "
                "or name its raw encoding"
            ) from error


def _open_raw(name: bytes, raw: RawFormat) -> Any:
    return _Sequential(
        name,
        format="RAW",
        subtype=raw.subtype,
        samplerate=raw.sample_rate_hz,
        channels=raw.channels,
        endian="LITTLE",
    )


def _if_any(block: Mono) -> Iterator[Mono]:
    if block.size:
        yield block


def _check_plain(path: Path) -> None:
    try:
        is_plain = stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError) as error:
        if str(path) != "-":
            raise InvalidAudioError("no such file; check the path") from error
        is_plain = False
    except (OSError, ValueError) as error:
        raise InvalidAudioError(f"not accessible ({error}); check the path") from error
    if not is_plain:
        raise InvalidAudioError("not a plain file; write the audio into a file and name that")
