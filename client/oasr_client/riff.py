"""WAV files whose header says another number of samples than there are.

Recorders that cannot go back to it leave 0 there; copies that were cut off have fewer.
"""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO

_RIFF = struct.Struct("<4sI4s")
_CHUNK = struct.Struct("<4sI")
#: libsndfile takes this size for "up to the end of the file".
_TO_THE_END = b"\xff\xff\xff\xff"
#: Programs that write into a pipe give such sizes for an unknown one.
_LEAST_UNKNOWN = 0x7FFFF000


class OpenEndedWav(io.FileIO):
    """The file with a data size of "up to the end" in place of the one at `size_position`."""

    def __init__(self, path: str | bytes, size_position: int) -> None:
        super().__init__(path)
        self._size_position = size_position

    def readinto(self, buffer: Any) -> int:
        begin = self.tell()
        count = super().readinto(buffer) or 0
        view = memoryview(buffer).cast("B")
        for offset, byte in enumerate(_TO_THE_END):
            index = self._size_position + offset - begin
            if 0 <= index < count:
                view[index] = byte
        return count


def open_endless_wav(path: str | bytes) -> OpenEndedWav | None:
    """The file up to its end, if it is a WAV whose data chunk of size 0 is followed by data."""
    with open(path, "rb") as file:
        position = _empty_data_chunk(file)
        if position is None or _ends_in_chunks(file, position + _CHUNK.size):
            return None
    return OpenEndedWav(path, position + 4)


def missing_bytes(path: str | bytes) -> int:
    """The number of samples that a WAV's header claims beyond the file's end; 0 for other files."""
    with open(path, "rb") as file:
        position, size = _data_chunk(file) or (0, 0)
        end = file.seek(0, io.SEEK_END)
    if size >= _LEAST_UNKNOWN:
        return 0
    return max(0, position + _CHUNK.size + size - end)


def _empty_data_chunk(file: BinaryIO) -> int | None:
    """Where a data chunk of size 0 begins."""
    position, size = _data_chunk(file) or (0, 1)
    return None if size else position


def _data_chunk(file: BinaryIO) -> tuple[int, int] | None:
    """The position of the data chunk, and the size that its header says."""
    head = file.read(_RIFF.size)
    if len(head) < _RIFF.size or (head[:4], head[8:]) != (b"RIFF", b"WAVE"):
        return None
    position = _RIFF.size
    while (chunk := _chunk_at(file, position)) is not None:
        name, size = chunk
        if name == b"data":
            return position, size
        position = _next(position, size)
    return None


def _ends_in_chunks(file: BinaryIO, position: int) -> bool:
    """Whether only whole chunks, as those of names, follow up to the end of the file."""
    end = file.seek(0, io.SEEK_END)
    while position < end:
        chunk = _chunk_at(file, position)
        if chunk is None or not (chunk[0].isascii() and chunk[0].decode().isprintable()):
            return False
        position = _next(position, chunk[1])
    # The padding of the last chunk may be missing.
    return position - end in (0, 1)


def _chunk_at(file: BinaryIO, position: int) -> tuple[bytes, int] | None:
    file.seek(position)
    head = file.read(_CHUNK.size)
    return _CHUNK.unpack(head) if len(head) == _CHUNK.size else None


def _next(position: int, size: int) -> int:
    return position + _CHUNK.size + size + size % 2
