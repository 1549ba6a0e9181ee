"""What a stream has been given, as long as it may have to be sent again."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from oasr_client.errors import ClientError
from oasr_client.wire import Samples

#: A stream holds so much in memory, and what is beyond in a temporary file.
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
        """Drops what is at `end` and behind."""
        self.end = end

    def forget(self, begin: int) -> None:
        """Drops what is before `begin`."""
        self.begin = max(begin, self.begin)
        # Copied when the dead part outgrows the rest: each sample moves once on average.
        if self.begin - self._origin > self.end - self.begin:
            kept = self.read(self.begin, self.end)
            self.close()
            self._file, self._origin = _new_file(), self.begin
            with _told():
                self._file.write(kept.tobytes())

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        # A stream may be dropped without an end; the file is then no leak to warn of.
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
