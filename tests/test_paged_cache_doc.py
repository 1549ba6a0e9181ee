"""docs/paged_cache.md: every drawing and number in it comes out of the real cache.

A fenced block that begins ```text NAME is replayed and compared, line by line.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from oasr_backend.cache import AttentionCacheManager, BlockPool, CacheConfig, bytes_per_kv_block
from oasr_backend.checkpoints import open_checkpoint
from tests.conftest import DEMO_DIR, ROOT

DOCUMENT = (ROOT / "docs" / "paged_cache.md").read_text(encoding="utf-8")
CHUNK, BLOCK = 4, 8
CPU = torch.device("cpu")


def fenced(name: str) -> str:
    """The lines of the document's block of that name."""
    (block,) = re.findall(rf"^```text {name}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return str(block).rstrip("\n")


def example_config(**changes: object) -> CacheConfig:
    fields: dict[str, object] = {
        "num_layers": 1, "n_kv_head": 1, "head_dim": 1, "hidden_dim": 1, "kernel_size": 2,
        "chunk_size": CHUNK, "block_size_frames": BLOCK, "num_left_chunks": 2, "max_num_blocks": 4,
        "max_blocks_per_seq": 2, "max_batch_size": 2, "position_limit_frames": 20,
        "device": CPU, "dtype": torch.float32,
    }  # fmt: skip
    return CacheConfig(**{**fields, **changes})  # type: ignore[arg-type]


class Scene:
    """Two streams and a padding lane. A frame's K is its chunk's number, so memory can be drawn."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = BlockPool(config, scratch_blocks=config.peak_blocks or 1)
        self.manager = AttentionCacheManager(self.pool, config, pad_lanes=1)
        self.open_ids: list[str] = []
        self.heard = {"A": 0, "B": 0}

    def open(self, stream_id: str) -> None:
        self.manager.allocate_stream(stream_id)
        self.open_ids.append(stream_id)

    def write(self, ids: list[str]) -> None:
        """One step of width 2: the lane takes the row that no stream has."""
        lanes = self.manager.pad_slots * (2 - len(ids))
        slots = [self.manager.slot_of(stream_id) for stream_id in ids] + lanes
        caches, _, _ = self.manager.get_batched_paged_caches(slots, chunk_frames=CHUNK)
        self.layout = caches[0].layout
        values = [self.heard[stream_id] for stream_id in ids] + [9] * len(lanes)
        k_BTHD = torch.tensor(values).view(-1, 1, 1, 1).expand(-1, CHUNK, 1, 1).float()
        caches[0].write(k_BTHD, k_BTHD)

    def commit(self, ids: list[str], frames: list[int]) -> None:
        self.manager.commit_chunks_paged_batched(ids, frames)
        for stream_id in ids:
            self.heard[stream_id] += 1

    # Drawing

    def owners(self) -> dict[int, tuple[str, int]]:
        """Of each held block: its stream and its column in the stream's table row."""
        owners = {}
        for stream_id in self.open_ids:
            row = self.manager.store.tables.host_table[self.manager.slot_of(stream_id)]
            held = self.manager.store.blocks_of(self.manager.slot_of(stream_id))
            owners.update({int(row[i]): (stream_id, i) for i in range(len(held))})
        return owners

    def draw_block(self, block_id: int) -> str:
        owner = self.owners().get(block_id)
        if owner is None:
            return "-"
        stream_id, column = owner
        slot, tables = self.manager.slot_of(stream_id), self.manager.store.tables
        start, end = int(tables.host_starts[slot]), int(tables.host_seqlens[slot])
        k_THD, _ = self.pool.get_kv_block_view(0, block_id)
        cells = ""
        for offset, value in enumerate(k_THD.flatten().int().tolist()):
            frame = column * BLOCK + offset
            cells += "x" if frame < start else str(value) if frame < end else "."
        return f"{stream_id} {cells}"

    def draw_numbers(self, stream_id: str) -> str:
        if stream_id not in self.open_ids:
            return "-"
        slot, tables = self.manager.slot_of(stream_id), self.manager.store.tables
        (position,) = self.manager.position_offsets([stream_id])
        return f"{tables.host_starts[slot]} {tables.host_seqlens[slot]:2} {position:2}"

    def line(self, moment: str) -> str:
        blocks = [self.draw_block(block_id) for block_id in range(self.pool.num_blocks)]
        free = " ".join(map(str, self.pool.free_block_ids())) or "none"
        numbers = [self.draw_numbers(stream_id) for stream_id in ("A", "B")]
        self.manager.check_integrity()
        return row(moment, *blocks, free, *numbers)


def row(moment: str, *cells: str) -> str:
    *blocks, free, a, b = cells
    drawn = "  ".join(f"{cell:10}" for cell in blocks)
    return f"{moment:14} {drawn}  {free:8} {a:8} {b}".rstrip()


def header() -> list[str]:
    head = row("moment", *(f"block {i}" for i in range(4)), "free", "A s l p", "B s l p")
    return [head, "-" * len(head)]


def draw_example() -> str:
    scene = Scene(example_config())
    lines = [*header(), scene.line("start")]
    scene.open("A")
    scene.open("B")
    lines.append(scene.line("open A, B"))
    steps: list[list[str]] = [["A", "B"], ["A", "B"], ["A"], ["A", "B"], ["A", "B"], ["A", "B"]]
    for number, ids in enumerate(steps):
        frames = [2 if (number, stream_id) == (5, "B") else CHUNK for stream_id in ids]
        scene.manager.prepare_chunks_batched(ids)
        lines.append(scene.line(f"{number} prepare"))
        scene.write(ids)
        scene.commit(ids, frames)
        lines.append(scene.line(f"{number} commit"))
    scene.manager.reset_stream("B")
    scene.heard["B"] = 0
    lines.append(scene.line("reset B"))
    scene.manager.free_stream("A")
    scene.open_ids.remove("A")
    lines.append(scene.line("free A"))
    return "\n".join(lines)


def draw_step() -> str:
    """Step 2 of the example, where B is silent and the lane takes its row."""
    scene = Scene(example_config())
    scene.open("A")
    scene.open("B")
    for ids in (["A", "B"], ["A", "B"]):
        scene.manager.prepare_chunks_batched(ids)
        scene.write(ids)
        scene.commit(ids, [CHUNK] * len(ids))
    scene.manager.prepare_chunks_batched(["A"])
    scene.write(["A"])
    layout = scene.layout
    write_BT = layout.write_index_N.view(2, CHUNK).tolist()
    lines = []
    for index, name in enumerate(("A", "lane")):
        read = " ".join(f"{frame:2}" for frame in layout.read_index_BK[index].tolist())
        valid = int(layout.valid_BK[index].sum())
        lines += [
            f"{name:4} write {' '.join(map(str, write_BT[index]))}",
            f"{name:4} read  {read}   valid: the first {valid}",
        ]
    return "\n".join(lines)


def draw_prefill() -> str:
    scene = Scene(example_config(prefill_kv_window=True))
    lines = [*header(), scene.line("start")]
    scene.open("A")
    scene.heard["A"] = 1
    lines.append(scene.line("open A"))
    for number in range(2):
        scene.manager.prepare_chunks_batched(["A"])
        lines.append(scene.line(f"{number} prepare"))
        scene.write(["A"])
        scene.commit(["A"], [CHUNK])
        lines.append(scene.line(f"{number} commit"))
    return "\n".join(lines)


def sizing_line(name: str, streams: int, config: CacheConfig) -> str:
    size = bytes_per_kv_block(
        num_layers=config.num_layers, block_size_frames=config.block_size_frames,
        n_kv_head=config.n_kv_head, head_dim=config.head_dim, dtype=config.dtype,
    )  # fmt: skip
    peak = config.peak_blocks
    assert peak is not None
    per_stream_kib = peak * size / 2**10
    return (
        f"{name:18} peak {peak} blocks x {size:6} bytes = {per_stream_kib:6.1f} KiB a stream, "
        f"{streams:4} streams: {per_stream_kib * streams / 2**10:7.1f} MiB"
    )


def served_config(
    num_layers: int, head_dim: int, dtype: torch.dtype, *, block: int = 16
) -> CacheConfig:
    """Chunk 16, 4 left chunks, 4 heads."""
    return CacheConfig(
        num_layers=num_layers, n_kv_head=4, head_dim=head_dim, dtype=dtype, device=CPU,
        chunk_size=16, num_left_chunks=4, block_size_frames=block, max_num_blocks=None,
    )  # fmt: skip


def demo_config() -> CacheConfig:
    """The shape of the shipped checkpoint."""
    attention = open_checkpoint(DEMO_DIR).info.encoder.attention
    assert attention is not None
    assert attention.num_kv_heads == 4
    return served_config(attention.num_layers, attention.head_dim, torch.float32)


def draw_sizing() -> str:
    wenet = served_config(12, 64, torch.bfloat16)
    large_blocks = served_config(12, 64, torch.bfloat16, block=64)
    return "\n".join(
        [
            sizing_line("demo, float32", 256, demo_config()),
            sizing_line("12x256, bfloat16", 2048, wenet),
            sizing_line("same, block 64", 2048, large_blocks),
        ]
    )


DRAWINGS = {
    "example": draw_example,
    "step": draw_step,
    "prefill": draw_prefill,
    "sizing": draw_sizing,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_what_the_document_prints_is_what_the_cache_does(name: str) -> None:
    draw: Callable[[], str] = DRAWINGS[name]
    assert fenced(name).split("\n") == draw().split("\n")


def test_every_named_block_of_the_document_is_replayed() -> None:
    assert set(re.findall(r"^```text (\w+)$", DOCUMENT, re.MULTILINE)) == set(DRAWINGS)
