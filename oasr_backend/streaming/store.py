"""Every cache of the served model behind one door: open, prepare, views, commit, free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oasr_backend.cache import (
    AttentionCacheManager,
    BlockPool,
    CacheConfig,
    CnnCacheManager,
    SlotStateCache,
    StreamContext,
    StreamSlotPool,
)
from oasr_backend.cache.sizing import (
    affordable_blocks,
    available_bytes,
    block_bytes,
    block_range,
    sized,
)
from oasr_backend.config import ServingConfig
from oasr_backend.decoders.base import Finish, Tail
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.decoders.kinds import DecoderKind
from oasr_backend.decoders.second_pass.final_order import Weighing
from oasr_backend.errors import ConfigError
from oasr_backend.models import EncoderCaches, EncoderSpec
from oasr_backend.models.acoustic_model import ModelOutput
from oasr_backend.options import StreamOptions
from oasr_backend.types import Hypothesis, StreamId


def build_cache_config(
    config: ServingConfig, spec: EncoderSpec, *, device: torch.device, dtype: torch.dtype
) -> CacheConfig:
    """The cache geometry of an encoder under the server's settings.

    A trained attention window overrides `num_left_chunks`. Raises ConfigError with the arithmetic,
    in terms of those settings.
    """
    for state in spec.state_specs:
        if state.persistent:
            raise ConfigError(
                f"the encoder declares {state.name!r} as persistent, and no request can set it: a "
                "prompt that nobody chose would be served; declare it with persistent=False"
            )
    num_left_chunks = config.num_left_chunks
    if spec.attention_window_frames is not None:
        num_left_chunks = -(-spec.attention_window_frames // config.chunk_size)
    geometry = CacheConfig(
        num_layers=spec.num_kv_layers,
        n_kv_head=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_dim=spec.model_dim,
        kernel_size=spec.conv_kernel_size,
        chunk_size=config.chunk_size,
        num_left_chunks=num_left_chunks,
        block_size_frames=config.block_size_frames,
        max_num_blocks=None,
        max_blocks_per_seq=config.max_blocks_per_seq,
        max_batch_size=config.max_streams,
        device=device,
        dtype=dtype,
        prefill_kv_window=spec.attention_window_frames is not None,
        stream_states=spec.state_specs,
        position_limit_frames=config.position_limit_frames,
    )
    if geometry.peak_blocks is not None:
        # No row is ever longer than the peak.
        geometry = replace(geometry, max_blocks_per_seq=geometry.peak_blocks)
    if config.max_num_blocks:
        _check_stated_pool(config, geometry)
        return replace(geometry, max_num_blocks=config.max_num_blocks)
    budget_bytes = config.cpu_kv_budget_mib << 20 if device.type == "cpu" else None
    _check_memory(config, geometry, budget_bytes)
    return sized(geometry, budget_bytes=budget_bytes)


def _check_stated_pool(config: ServingConfig, geometry: CacheConfig) -> None:
    per_stream = geometry.peak_blocks or 1
    needed = config.max_streams * per_stream
    if config.max_num_blocks < needed:
        raise ConfigError(
            f"max_num_blocks={config.max_num_blocks} is less than the {needed} blocks that "
            f"max_streams={config.max_streams} streams need, {per_stream} each; raise "
            f"max_num_blocks, set it to 0 for what is needed, or {_less_need(geometry)}"
        )


def _check_memory(config: ServingConfig, geometry: CacheConfig, budget_bytes: int | None) -> None:
    needed, _ = block_range(geometry)
    available, words = available_bytes(geometry, budget_bytes)
    if affordable_blocks(geometry, available) >= needed:
        return
    need_mib = -(-needed * block_bytes(geometry) >> 20)
    if budget_bytes is None:
        limit = f"{geometry.device} has {max(0, available) >> 20} MiB for it ({words}, in bytes)"
        more = "free memory of that GPU"
    else:
        limit = f"cpu_kv_budget_mib={config.cpu_kv_budget_mib}"
        more = f"set cpu_kv_budget_mib={need_mib}"
    raise ConfigError(
        f"the K/V pool of max_streams={config.max_streams} streams needs {need_mib} MiB ({needed} "
        f"blocks of {block_bytes(geometry)} bytes), but {limit}; {more}, or {_less_need(geometry)}"
    )


def _less_need(geometry: CacheConfig) -> str:
    if geometry.prefill_kv_window or geometry.num_left_chunks == 0:
        return "lower max_streams"
    less = "num_left_chunks" if geometry.evicts else "bound the history with num_left_chunks"
    return f"lower max_streams or {less}"


class DecoderDoor:
    """The decoders for callers who name streams by generation."""

    def __init__(self, group: DecoderGroup) -> None:
        self.group = group
        self._slot_of: dict[StreamId, int] = {}

    @property
    def num_streams(self) -> int:
        return self.group.num_streams

    @property
    def kinds(self) -> list[DecoderKind]:
        return self.group.kinds

    @property
    def weighs_ends(self) -> bool:
        return self.group.weighs_ends

    def drop_idle_kinds(self) -> None:
        self.group.drop_idle_kinds()

    def check(self, options: StreamOptions) -> None:
        self.group.check(options)

    def allocate_stream(self, stream_id: StreamId, slot: int, options: StreamOptions) -> None:
        self.group.open(slot, options)
        self._slot_of[stream_id] = slot

    def free_stream(self, stream_id: StreamId) -> None:
        self.group.close(self._slot_of.pop(stream_id))

    def get_decoder(self, stream_id: StreamId) -> None:
        """A stream's decoder is a row of the group, and has no handle of its own."""

    def begin(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], output: ModelOutput
    ) -> Finish:
        slots_B = np.array(self._slots(stream_ids), dtype=np.int64)
        frames_B = np.array(num_frames, dtype=np.int64)
        heads = {"ctc": output.logits_BTV}
        return self.group.begin(slots_B, frames_B, heads, output.encoded_BTD)

    def end(self, stream_ids: Sequence[StreamId]) -> Weighing | None:
        return self.group.end(self._slots(stream_ids))

    def is_rescored(self, stream_id: StreamId) -> bool:
        return self.group.is_rescored(self._slot_of[stream_id])

    def best(
        self, stream_ids: Sequence[StreamId], *, skips: Sequence[int] | None = None
    ) -> list[Hypothesis]:
        return self.group.best(self._slots(stream_ids), skips=skips)

    def tails(self, stream_ids: Sequence[StreamId], skips: Sequence[int]) -> list[Tail]:
        return self.group.tails(self._slots(stream_ids), skips)

    def nbest(self, stream_id: StreamId, count: int, *, skip: int = 0) -> list[Hypothesis]:
        return self.group.nbest(self._slot_of[stream_id], count, skip=skip)

    def num_stable(self, stream_id: StreamId) -> int:
        return self.group.num_stable(self._slot_of[stream_id])

    def check_integrity(self) -> None:
        self.group.check_integrity(self._slot_of.values())

    def _slots(self, stream_ids: Sequence[StreamId]) -> list[int]:
        return [self._slot_of[stream_id] for stream_id in stream_ids]


class StreamCaches:
    """The managers of one engine, one row number per stream shared by all of them.

    Streams are named by generation. State changes at open, prepare, commit and free only.
    """

    def __init__(self, config: CacheConfig, decoders: DecoderGroup) -> None:
        self.config = config
        # One lane that no stream is bound to takes the rows that pad a step to a captured width.
        self.pool = BlockPool(config, scratch_blocks=config.peak_blocks or 1)
        self.slots = StreamSlotPool(config.max_batch_size)
        self.attention = AttentionCacheManager(self.pool, config, pad_lanes=1, slot_pool=self.slots)
        self.conv = CnnCacheManager(config, extra_slots=1, slot_pool=self.slots)
        # Whatever else the encoder declares; none for a Conformer.
        self.states = SlotStateCache(
            config.stream_states,
            config.max_batch_size,
            config.device,
            dtype=config.dtype,
            extra_slots=1,
            slot_pool=self.slots,
        )
        self.ctc = DecoderDoor(decoders)

    def open(self, generation: int, options: StreamOptions) -> StreamContext[None]:
        """Allocates every per-stream state, or none of it; `options` choose the decoder."""
        with ExitStack() as undo:
            self.attention.allocate_stream(generation)
            undo.callback(self.attention.free_stream, generation)
            self.conv.allocate_stream(generation)
            undo.callback(self.conv.free_stream, generation)
            self.states.allocate_stream(generation)
            undo.callback(self.states.free_stream, generation)
            (slot,) = self.attention.slots_of([generation])
            self.ctc.allocate_stream(generation, int(slot), options)
            undo.pop_all()
        return StreamContext(generation, self.attention, self.conv, self.ctc, states=self.states)

    def prepare(self, generations: Sequence[int]) -> None:
        """Makes room for one more chunk of every stream; nothing is written yet."""
        self.attention.prepare_chunks_batched(generations)
        self.conv.zero_pending()
        self.states.zero_pending()

    def row_data(
        self, generations: Sequence[int], num_frames: Sequence[int], *, width: int
    ) -> npt.NDArray[np.int64]:
        """(3, width): slot, real new frames and position of the oldest visible key of each row.

        Rows past the streams belong to the padding lane.
        """
        attention = self.attention
        rows_3W = np.empty((3, width), dtype=np.int64)
        rows_3W[:] = [[attention.pad_slots[0]], [self.config.chunk_size], [0]]
        slots_B = attention.slots_of(generations)
        rows_3W[:, : len(slots_B)] = slots_B, num_frames, attention.first_key_positions(slots_B)
        return rows_3W

    def history_frames(self, generations: Sequence[int]) -> int:
        """The most frames that any of the streams sees of its past."""
        return self.attention.cached_frames(generations)

    def encoder_caches(self, rows_3W: Tensor, *, history_frames: int) -> EncoderCaches:
        """What the encoder reads and writes in a step of `row_data`; tensors only, no sync.

        `history_frames` bounds every row's history from above.
        """
        slots_W, num_new_W, first_key_position_W = rows_3W.unbind()
        kv, _, _ = self.attention.get_batched_paged_caches(
            slots_W,
            chunk_frames=self.config.chunk_size,
            num_new_B=num_new_W,
            history_frames=history_frames,
        )
        conv = self.conv.view_of("conv", slots_W)
        return EncoderCaches(
            kv=kv,
            conv=conv,
            first_key_position_B=first_key_position_W,
            states=self.states.staged_views(slots_W),
        )

    def commit(
        self, generations: Sequence[int], num_frames: Sequence[int], output: ModelOutput
    ) -> Finish:
        """Makes the step count: lengths advance, old history goes.

        `output` has been read, as the device sees it, when this returns. The hypotheses grow with
        the returned call, which waits for the device.
        """
        self.attention.commit_chunks_paged_batched(generations, num_frames, upload=False)
        return self.ctc.begin(generations, num_frames, output)

    def hypotheses(self, generations: Sequence[int]) -> list[Hypothesis]:
        """The best hypothesis of each stream so far, without device work."""
        return self.ctc.best(generations)

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.attention.check_integrity()
        self.ctc.check_integrity()
