"""The audio that a session keeps after it sent it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oasr_client.errors import ClientError
from oasr_client.sent import MEMORY_BYTES, SentAudio

PCM16 = np.dtype(np.int16)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=12))
def test_what_is_not_forgotten_is_read_as_it_was_written(steps: list[tuple[int, int]]) -> None:
    kept, everything = SentAudio(PCM16), np.empty(0, np.int16)
    for num_samples, num_forgotten in steps:
        chunk = np.arange(everything.size, everything.size + num_samples).astype(np.int16)
        kept.append(chunk)
        everything = np.concatenate([everything, chunk])
        kept.forget(min(kept.begin + num_forgotten, kept.end))
        assert kept.end == everything.size
        np.testing.assert_array_equal(kept.read(kept.begin, kept.end), everything[kept.begin :])
    kept.close()


def test_a_cut_makes_room_for_other_samples() -> None:
    kept = SentAudio(PCM16)
    kept.append(np.array([1, 2, 3], np.int16))
    kept.cut(1)
    kept.append(np.array([9], np.int16))
    assert kept.read(0, kept.end).tolist() == [1, 9]


def test_a_full_disk_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("r+b", buffering=0) as always_full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, **__: always_full)
        with pytest.raises(ClientError, match=r"kept in .* \(No space left on device\)"):
            SentAudio(PCM16).append(np.zeros(MEMORY_BYTES, np.int16))
