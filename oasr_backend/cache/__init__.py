"""All per-stream state on the device: paged attention K/V, slots, decoder states."""

from oasr_backend.cache.attention_cache import AttentionCacheManager
from oasr_backend.cache.block_pool import BlockPool
from oasr_backend.cache.cnn_cache import CnnCacheManager
from oasr_backend.cache.ctc_state import CtcStateCacheManager, StreamHandle
from oasr_backend.cache.decoder_kv import DecoderKVCacheManager
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.paged_decoder_kv import PagedDecoderKv
from oasr_backend.cache.paged_kv import PagedKVCache, PagedLayout, PagedRows
from oasr_backend.cache.sizing import bytes_per_kv_block, derive_max_num_blocks
from oasr_backend.cache.slot_pool import StreamSlotPool
from oasr_backend.cache.state import SlotStateCache, SlotStates, SlotTensor, StagedSlotTensor
from oasr_backend.cache.state_spec import StreamStateSpec
from oasr_backend.cache.stream import StreamContext
from oasr_backend.cache.types import CacheConfig

__all__ = [
    "AttentionCacheManager",
    "BlockPool",
    "CacheConfig",
    "CnnCacheManager",
    "CtcStateCacheManager",
    "DecoderKVCacheManager",
    "KvStore",
    "PagedDecoderKv",
    "PagedKVCache",
    "PagedLayout",
    "PagedRows",
    "SlotStateCache",
    "SlotStates",
    "SlotTensor",
    "StagedSlotTensor",
    "StreamContext",
    "StreamHandle",
    "StreamSlotPool",
    "StreamStateSpec",
    "bytes_per_kv_block",
    "derive_max_num_blocks",
]
