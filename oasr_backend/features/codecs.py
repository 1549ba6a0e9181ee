"""Telephone codecs of ITU-T G.711: one byte per sample to float32 in [-1, 1]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oasr_backend.types import Samples

Codes = npt.NDArray[np.uint8]

_MULAW_BIAS = 33


def decode_mulaw(codes_S: Codes) -> Samples:
    """Decodes mu-law bytes as they travel (all bits inverted); full scale is 8031 / 8192."""
    return _MULAW_TABLE[codes_S]


def decode_alaw(codes_S: Codes) -> Samples:
    """Decodes A-law bytes as they travel (even bits inverted); full scale is 4032 / 4096."""
    return _ALAW_TABLE[codes_S]


def _mulaw_table() -> Samples:
    """y = 2^segment (2 step + 33) - 33 in 14-bit units."""
    code = ~np.arange(256, dtype=np.uint8)
    segment, step = _segment_and_step(code)
    magnitude = (2 * step + _MULAW_BIAS) * 2**segment - _MULAW_BIAS
    return _frozen(np.where(code & 0x80, -magnitude, magnitude) / 8192)


def _alaw_table() -> Samples:
    """y = 2 step + 1 in segment 0, else 2^(segment - 1) (2 step + 33), in 13-bit units."""
    code = np.arange(256, dtype=np.uint8) ^ np.uint8(0x55)
    segment, step = _segment_and_step(code)
    curved = (2 * step + 33) * 2 ** np.maximum(segment - 1, 0)
    magnitude = np.where(segment == 0, 2 * step + 1, curved)
    return _frozen(np.where(code & 0x80, magnitude, -magnitude) / 4096)


def _segment_and_step(code: Codes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    wide = code.astype(np.int64)
    return (wide >> 4) & 7, wide & 15


def _frozen(values: npt.NDArray[np.float64]) -> Samples:
    table = values.astype(np.float32)
    table.flags.writeable = False
    return table


_MULAW_TABLE = _mulaw_table()
_ALAW_TABLE = _alaw_table()
