"""Storage rows of the streams: who holds which, and the state object that says so."""

from __future__ import annotations

from oasr_backend.errors import DecoderStateError, StreamStateError

_FIRST_CAPACITY = 32


class StreamState:
    """What a stream holds in a decoder: one storage row per batch entry.

    The values live in the decoder's pooled buffers. `step` is the number of frames heard.
    """

    __slots__ = ("_rows", "owner", "step", "vocab_size")

    def __init__(self, owner: RowPool, rows: tuple[int, ...], vocab_size: int) -> None:
        self.owner = owner
        self._rows = rows
        self.vocab_size = vocab_size
        self.step = 0

    @property
    def batch(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """Raises DecoderStateError after release."""
        if not self._rows:
            raise DecoderStateError(
                "the stream state was released; make another with create_state()"
            )
        return self._rows

    def give_up_rows(self) -> tuple[int, ...]:
        rows, self._rows = self.rows, ()
        return rows

    def take_rows(self, rows: tuple[int, ...]) -> None:
        self._rows = rows


class RowPool:
    """Hands out row numbers, the last freed first. Doubles when empty; the owner grows buffers."""

    def __init__(self) -> None:
        self.capacity = 0
        self._free: list[int] = []
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        while len(self._free) < count:
            self._double()
        rows = tuple(self._free.pop() for _ in range(count))
        self._held.update(rows)
        return rows

    def _double(self) -> None:
        grown = max(_FIRST_CAPACITY, 2 * self.capacity)
        self._free = list(range(grown - 1, self.capacity - 1, -1)) + self._free
        self.capacity = grown

    def free(self, rows: tuple[int, ...]) -> None:
        strangers = [row for row in rows if row not in self._held]
        if strangers:
            raise StreamStateError(f"rows {strangers} are not held; free each row once")
        self._held.difference_update(rows)
        self._free.extend(rows)

    def check_integrity(self) -> None:
        """Every row is free or held, never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a row is on the free list twice"
        assert not free & self._held, "a row is free and held"
        assert len(free) + len(self._held) == self.capacity, "a row is lost"
