"""The audio of a stream, kept for as long as the client may have to send it again."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from oasr_client.errors import ClientError
from oasr_client.wire import Samples

#: A stream holds this much in memory, and the rest in a temporary file.
MEMORY_BYTES = 4 << 20


class SentAudio:
    """Samples `begin` .. `end` of a stream, counted from its first one.

    Raises ClientError where the temporary file cannot be written.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.begin = 0
        self.end = 0
        self._dtype = dtype
        self._file = _new_file()
        # The sample that the file begins with.
        self._origin = 0

    def append(self, samples_S: Samples) -> None:
        with _told():
            self._seek(self.end)
            self._file.write(samples_S.astype(self._dtype, copy=False).tobytes())
        self.end += samples_S.size

    def read(self, begin: int, end: int) -> Samples:
        with _told():
            self._seek(begin)
            content = self._file.read((end - begin) * self._dtype.itemsize)
        return np.frombuffer(content, self._dtype)

    def cut(self, end: int) -> None:
        """Drops the samples from `end` on."""
        self.end = end

    def forget(self, begin: int) -> None:
        """Drops the samples before `begin`."""
        self.begin = max(begin, self.begin)
        # The file is copied when its dead part outgrows the rest: a sample moves once on average.
        if self.begin - self._origin > self.end - self.begin:
            kept = self.read(self.begin, self.end)
            self.close()
            self._file, self._origin = _new_file(), self.begin
            with _told():
                self._file.write(kept.tobytes())

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        # A caller may drop a stream without END. Python must not warn of its file as a leak.
        self.close()

    def _seek(self, sample: int) -> None:
        self._file.seek((sample - self._origin) * self._dtype.itemsize)


def _new_file() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClientError(
            f"what was sent cannot be kept in {tempfile.gettempdir()} ({error.strerror}); free "
            "space there, set TMPDIR, or lower replay_limit_s"
        ) from error
