"""Memory that is NaN from the moment that it is freed, so that a stale read cannot hide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from oasr_backend.cache import BlockPool, SlotStates

NAN = float("nan")


class PoisonedPool(BlockPool):
    """Every block is NaN until it is handed out, and again from the moment that it is freed."""

    def _make_storage(self) -> None:
        super()._make_storage()
        self._kv_pool.fill_(NAN)
        self._kv_pool[:, :, self.num_blocks :] = 0

    def _before_reuse(self, block_ids: Iterable[int]) -> None:
        for layer in range(self.config.num_layers):
            for block_id in block_ids:
                for k_or_v in self.get_kv_block_view(layer, block_id):
                    k_or_v.fill_(NAN)


class UnzeroedPool(PoisonedPool):
    """Hands blocks out as they are: what is read must be safe by its indices alone."""

    def zero_blocks(self, block_ids: Sequence[int] | Tensor) -> None:
        pass


class PoisonedStates(SlotStates):
    """A slot is NaN from its closing on."""

    def _before_reuse(self, slot: int) -> None:
        for name in self.specs:
            self.fill_slot(name, slot, NAN)
