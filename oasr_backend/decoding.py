"""Every stream's decoder, whatever its options ask for: one batched decode per kind and step.

A kind is a search with its beam size. Its decoder is made when a stream first asks for it, so that
a server whose streams all take the defaults has one, and pays for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from oasr_backend.cache import CtcStateCacheManager, StreamHandle
from oasr_backend.decoders import GpuDecoderConfig
from oasr_backend.decoders.config import DecoderName
from oasr_backend.errors import StreamStateError, UnknownStreamError
from oasr_backend.stream_options import StreamOptions
from oasr_backend.types import Hypothesis, StreamId


class DecoderKind(NamedTuple):
    """What streams must have in common to be decoded together."""

    search: DecoderName
    beam_size: int

    @classmethod
    def of(cls, options: StreamOptions) -> DecoderKind:
        if options.decoder == "prefix_beam":
            return cls("prefix_beam", options.beam_size)
        return cls("greedy", 1)


class StreamDecoders:
    """Implements what a `StreamContext` asks of decoder states. Streams are named by generation."""

    def __init__(self, config: GpuDecoderConfig, *, device: torch.device, vocab_size: int) -> None:
        """`config` is what a stream without options gets; others share its further settings."""
        self._config = config
        self._device = device
        self._vocab_size = vocab_size
        self._managers: dict[DecoderKind, CtcStateCacheManager] = {}
        self._manager_of: dict[StreamId, CtcStateCacheManager] = {}

    @property
    def num_streams(self) -> int:
        return len(self._manager_of)

    @property
    def kinds(self) -> list[DecoderKind]:
        """Those that any stream has asked for so far."""
        return list(self._managers)

    def allocate_stream(self, stream_id: StreamId, options: StreamOptions | None = None) -> None:
        """Raises StreamStateError for an id that is open."""
        if stream_id in self._manager_of:
            raise StreamStateError(f"stream {stream_id!r} is already allocated; free it first")
        manager = self._manager(self._kind(options))
        manager.allocate_stream(stream_id, batch=1, vocab_size=self._vocab_size)
        self._manager_of[stream_id] = manager

    def free_stream(self, stream_id: StreamId) -> None:
        self._find(stream_id).free_stream(stream_id)
        del self._manager_of[stream_id]

    def get_decoder(self, stream_id: StreamId) -> StreamHandle:
        return self._find(stream_id).get_decoder(stream_id)

    def decode(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], logits_BTV: Tensor
    ) -> None:
        """One step: row i of the (B, T, V) scores belongs to stream i."""
        by_manager = self._rows_by_manager(stream_ids)
        for manager, rows in by_manager.items():
            scores_NTV = logits_BTV if len(by_manager) == 1 else logits_BTV[rows]
            states = manager.get_states([stream_ids[row] for row in rows])
            frames = [num_frames[row] for row in rows]
            manager.decoder.decode_chunk_batch(scores_NTV, states, num_frames=frames)

    def best(
        self, stream_ids: Sequence[StreamId], *, skips: Sequence[int] | None = None
    ) -> list[Hypothesis]:
        """Each stream's best hypothesis, without its first `skips` tokens; no device work."""
        skips = [0] * len(stream_ids) if skips is None else skips
        found: dict[int, Hypothesis] = {}
        for manager, rows in self._rows_by_manager(stream_ids).items():
            states = manager.get_states([stream_ids[row] for row in rows])
            best = manager.decoder.best_batch(states, skips=[skips[row] for row in rows])
            found.update(zip(rows, best, strict=True))
        return [found[row] for row in range(len(stream_ids))]

    def nbest(self, stream_id: StreamId, count: int) -> list[Hypothesis]:
        """The `count` best hypotheses of one stream, or as many as there are; best first."""
        handle = self.get_decoder(stream_id)
        return handle.decoder.nbest(handle.state, count)

    def num_stable(self, stream_id: StreamId) -> int:
        """How many first tokens of every hypothesis can no longer change."""
        handle = self.get_decoder(stream_id)
        return handle.decoder.num_stable(handle.state)

    def check_integrity(self) -> None:
        """Every stream is with exactly one manager, and every manager agrees with itself."""
        num_held = sum(manager.num_streams for manager in self._managers.values())
        assert num_held == len(self._manager_of), "a manager keeps a stream that is gone"
        for stream_id, manager in self._manager_of.items():
            manager.get_states([stream_id])
        for manager in self._managers.values():
            manager.check_integrity()

    def _kind(self, options: StreamOptions | None) -> DecoderKind:
        if options is not None:
            return DecoderKind.of(options)
        is_beam = self._config.decoder == "prefix_beam"
        return DecoderKind(self._config.decoder, self._config.beam_size if is_beam else 1)

    def _manager(self, kind: DecoderKind) -> CtcStateCacheManager:
        if kind not in self._managers:
            config = replace(self._config, decoder=kind.search, beam_size=kind.beam_size, nbest=1)
            self._managers[kind] = CtcStateCacheManager(config, device=self._device)
        return self._managers[kind]

    def _find(self, stream_id: StreamId) -> CtcStateCacheManager:
        try:
            return self._manager_of[stream_id]
        except KeyError:
            raise UnknownStreamError(
                f"stream {stream_id!r} has no decoder; allocate_stream() comes first"
            ) from None

    def _rows_by_manager(
        self, stream_ids: Sequence[StreamId]
    ) -> dict[CtcStateCacheManager, list[int]]:
        rows: dict[CtcStateCacheManager, list[int]] = {}
        for row, stream_id in enumerate(stream_ids):
            rows.setdefault(self._find(stream_id), []).append(row)
        return rows
