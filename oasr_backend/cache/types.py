"""Geometry of the caches: how many frames a stream keeps, and the blocks that takes.

Terms: a *frame* is one encoder output frame, a *chunk* is the frames of one step, a *block* is the
unit in which the K/V pool is handed out. All counts are per stream unless the name says otherwise.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import cached_property

import torch

from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.errors import ConfigError

logger = logging.getLogger(__name__)

_POSITIVE_FIELDS = (
    "n_kv_head",
    "head_dim",
    "hidden_dim",
    "kernel_size",
    "chunk_size",
    "block_size_frames",
    "max_blocks_per_seq",
    "max_batch_size",
    "position_limit_frames",
)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class CacheConfig:
    """One checked description of every cache. Raises ConfigError with the arithmetic.

    A chunk sees, beside itself, `num_left_chunks` past chunks (0: no history, -1: all of it) or
    exactly the last `window_frames` frames. The latter is a trained window, which need not be a
    multiple of the chunk or the block. With `prefill_kv_window` a stream starts with that history,
    zeroed.
    `max_num_blocks` is None only until `sizing.derive_max_num_blocks` has filled it in.
    `position_limit_frames`: a stream's positions are re-based before they reach this value.
    """

    num_layers: int = 12
    n_kv_head: int = 4
    head_dim: int = 64
    hidden_dim: int = 256
    kernel_size: int = 15
    chunk_size: int = 16
    num_left_chunks: int = -1
    window_frames: int | None = None
    block_size_frames: int = 16
    max_num_blocks: int | None = 1024
    max_blocks_per_seq: int = 512
    max_batch_size: int = 32
    device: torch.device = field(default_factory=default_device)
    dtype: torch.dtype = torch.bfloat16
    prefill_kv_window: bool = False
    stream_states: tuple[StreamStateSpec, ...] = ()
    position_limit_frames: int = 5000

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_geometry()
        if self.max_num_blocks is not None:
            self._check_pool(self.max_num_blocks)

    @cached_property
    def evicts(self) -> bool:
        """Whether history is bounded."""
        return self.window_frames is not None or self.num_left_chunks >= 0

    @property
    def kv_last_dim(self) -> int:
        """K and V packed along the last dimension, as the dense calls take them."""
        return 2 * self.head_dim

    @property
    def cnn_cache_frames(self) -> int:
        return self.kernel_size - 1

    @cached_property
    def max_cache_frames(self) -> int:
        """Most frames of history that a chunk sees; -1 when unlimited."""
        if self.window_frames is not None:
            return self.window_frames
        return self.chunk_size * self.num_left_chunks if self.evicts else -1

    @property
    def max_logical_blocks(self) -> int | None:
        """Blocks of the retained history alone, packed from a block's first frame."""
        return math.ceil(self.max_cache_frames / self.block_size_frames) if self.evicts else None

    @cached_property
    def peak_blocks(self) -> int | None:
        """Most blocks held at once: history, the chunk being written and the evicted frames that
        still share the first block. None when history is unlimited."""
        if not self.evicts:
            return None
        frames = self._hidden_frames + self.max_cache_frames + self.chunk_size
        return math.ceil(frames / self.block_size_frames)

    @cached_property
    def blocks_per_stream(self) -> int:
        """Blocks that one stream may hold: the peak, or its fair share when unlimited."""
        if self.peak_blocks is not None:
            return self.peak_blocks
        return min(self.max_blocks_per_seq, self.pool_blocks // self.max_batch_size)

    @property
    def max_stream_frames(self) -> int:
        return self.blocks_per_stream * self.block_size_frames

    @property
    def prefilled_cache_frames(self) -> int:
        """Zero frames that a new stream starts with."""
        return self.max_cache_frames if self.prefill_kv_window else 0

    @property
    def pool_blocks(self) -> int:
        """`max_num_blocks` once it is known."""
        if self.max_num_blocks is None:
            raise ConfigError(
                "max_num_blocks is not set: derive it with sizing.derive_max_num_blocks"
            )
        return self.max_num_blocks

    @property
    def _hidden_frames(self) -> int:
        """Evicted frames that may share a block with visible ones, rounded down to the grid.

        One end of the frames that a row holds in a step lies on a multiple of the gcd of chunk and
        block: the last, or the first where the history is prefilled.
        """
        return self.block_size_frames - math.gcd(self.chunk_size, self.block_size_frames)

    def _check_numbers(self) -> None:
        for name in _POSITIVE_FIELDS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_layers < 0:
            raise ConfigError(
                f"num_layers={self.num_layers} must be 0 (an encoder without K/V) or more"
            )
        if self.max_num_blocks is not None and self.max_num_blocks < 1:
            raise ConfigError(f"max_num_blocks={self.max_num_blocks} must be at least 1")
        self._check_history()

    def _check_history(self) -> None:
        if self.num_left_chunks < -1:
            raise ConfigError(
                f"num_left_chunks={self.num_left_chunks} must be -1 (unlimited), 0 or more"
            )
        if self.window_frames is not None and self.window_frames < 0:
            raise ConfigError(f"window_frames={self.window_frames} must be 0 or more, or None")
        if self.window_frames is not None and self.num_left_chunks >= 0:
            raise ConfigError(
                f"window_frames={self.window_frames} and num_left_chunks={self.num_left_chunks} "
                "both bound the history: leave num_left_chunks at -1 for a trained window"
            )
        if self.prefill_kv_window and not self.evicts:
            raise ConfigError(
                "prefill_kv_window needs a bounded window, got num_left_chunks=-1: "
                "set window_frames to the trained window"
            )

    def _check_geometry(self) -> None:
        if self.chunk_size > self.block_size_frames:
            raise ConfigError(
                f"chunk_size={self.chunk_size} > block_size_frames={self.block_size_frames}: "
                "a chunk may cross one block's end at most; raise block_size_frames"
            )
        if self.peak_blocks is not None and self.peak_blocks > self.max_blocks_per_seq:
            raise ConfigError(
                f"max_blocks_per_seq={self.max_blocks_per_seq} cannot address the "
                f"{self.peak_blocks} blocks that {self._peak_arithmetic()} need; raise it"
                f"{self._or_less_history(', or lower ')}"
            )
        most_visible = self.max_cache_frames + self.chunk_size
        if self.evicts and most_visible > self.position_limit_frames:
            raise ConfigError(
                f"position_limit_frames={self.position_limit_frames} is less than the "
                f"{self._visible_arithmetic()} = {most_visible} frames that a chunk sees"
            )

    def _check_pool(self, max_num_blocks: int) -> None:
        if not self.evicts:
            self._check_share(max_num_blocks)
            return
        needed = self.max_batch_size * self.blocks_per_stream
        if max_num_blocks < needed:
            raise ConfigError(
                f"max_num_blocks={max_num_blocks} < {needed} = max_batch_size {self.max_batch_size}"
                f" * {self.blocks_per_stream} blocks a stream ({self._peak_arithmetic()}); raise "
                f"max_num_blocks, or lower max_batch_size{self._or_less_history(' or ')}"
            )

    def _check_share(self, max_num_blocks: int) -> None:
        if max_num_blocks < self.max_batch_size:
            raise ConfigError(
                f"max_num_blocks={max_num_blocks} leaves no block for each of "
                f"{self.max_batch_size} streams (max_batch_size); raise max_num_blocks"
            )
        logger.info(
            "unlimited history: a stream ends after %s blocks * %s = %s frames; raise "
            "max_num_blocks, or set num_left_chunks to bound history instead",
            self.blocks_per_stream,
            self.block_size_frames,
            self.max_stream_frames,
        )

    def _peak_arithmetic(self) -> str:
        return (
            f"ceil(({self._hidden_frames} evicted + {self._visible_arithmetic()} frames) / "
            f"{self.block_size_frames})"
        )

    def _visible_arithmetic(self) -> str:
        if self.window_frames is not None:
            return f"{self.window_frames} trained + {self.chunk_size}"
        return f"({self.num_left_chunks} left + 1) * {self.chunk_size}"

    def _or_less_history(self, conjunction: str) -> str:
        """The remedy that a trained window, which is no setting, does not leave."""
        return f"{conjunction}num_left_chunks" if self.window_frames is None else ""
