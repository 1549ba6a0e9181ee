"""A small streaming encoder (attention, causal convolution): its output depends on all it may see.

Three ways to the same numbers: `forward_chunk_paged`, `forward_chunk` (dense), and `offline`, an
oracle that keeps whole histories in Python lists and knows nothing of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oasr_backend.cache import CacheConfig, PagedKVCache


class StandInModel:
    """Weights are fixed by `seed`; frames are (B, T, hidden_dim) in and (B, T, vocab) out."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        num_heads: int | None = None,
        vocab_size: int = 7,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.num_heads = num_heads or config.n_kv_head
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            return drawn.to(config.dtype).to(config.device)

        layers, dim = config.num_layers, config.hidden_dim
        self.query = weight(layers, self.num_heads * config.head_dim, dim)
        self.key = weight(layers, config.n_kv_head * config.head_dim, dim)
        self.value = weight(layers, config.n_kv_head * config.head_dim, dim)
        self.project = weight(layers, dim, self.num_heads * config.head_dim)
        self.kernel = weight(layers, dim, config.kernel_size)
        self.output = weight(vocab_size, dim)

    def forward_chunk_paged(
        self,
        xs: Tensor,
        offset: int | Tensor,
        att_caches: Sequence[PagedKVCache],
        cnn_cache: Tensor,
        cache_t1: int,
    ) -> tuple[Tensor, Tensor]:
        x_BTD, new_cnn = xs, []
        for layer, cache in enumerate(att_caches):
            q_BTHD, k_BTHD, v_BTHD = self._project_in(layer, x_BTD, offset)
            cache.write(k_BTHD, v_BTHD)
            k_BKHD, v_BKHD = cache.gather(cache_t1 + xs.shape[1])
            x_BTD = x_BTD + self._attend(layer, q_BTHD, k_BKHD, v_BKHD, cache.layout.valid_BK)
            x_BTD, tail = self._convolve(layer, x_BTD, cnn_cache[layer])
            new_cnn.append(tail)
        return self._log_probs(x_BTD), torch.stack(new_cnn)

    def forward_chunk(
        self,
        xs: Tensor,
        offset: int,
        required_cache_size: int,  # noqa: ARG002
        att_cache: Tensor,
        cnn_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_BTD, new_att, new_cnn = xs, [], []
        for layer in range(self.config.num_layers):
            q_BTHD, k_BTHD, v_BTHD = self._project_in(layer, x_BTD, offset)
            packed = torch.cat((k_BTHD, v_BTHD), dim=-1).transpose(1, 2)[0]
            if att_cache.numel():
                packed = torch.cat((att_cache[layer], packed), dim=1)
            k_BKHD, v_BKHD = packed.transpose(0, 1).unsqueeze(0).chunk(2, dim=-1)
            valid_BK = torch.ones(1, packed.shape[1], dtype=torch.bool, device=xs.device)
            x_BTD = x_BTD + self._attend(layer, q_BTHD, k_BKHD, v_BKHD, valid_BK)
            x_BTD, tail = self._convolve(layer, x_BTD, cnn_cache[layer])
            new_att.append(packed)
            new_cnn.append(tail)
        return self._log_probs(x_BTD), torch.stack(new_att), torch.stack(new_cnn)

    def offline(
        self, chunks: Sequence[Tensor], num_left_chunks: int, window_frames: int | None = None
    ) -> list[Tensor]:
        """Log-probs of each (1, T, D) chunk.

        A layer sees `num_left_chunks` chunks before it, or the last `window_frames` frames.
        """
        keys: list[list[Tensor]] = [[] for _ in range(self.config.num_layers)]
        values: list[list[Tensor]] = [[] for _ in range(self.config.num_layers)]
        pad = torch.zeros(
            self.config.num_layers, 1, self.config.cnn_cache_frames, self.config.hidden_dim
        )
        tails = list(pad.to(chunks[0]))
        outputs, heard = [], 0
        for chunk in chunks:
            x_BTD = chunk
            for layer in range(self.config.num_layers):
                q_BTHD, k_BTHD, v_BTHD = self._project_in(layer, x_BTD, heard)
                keys[layer].append(k_BTHD)
                values[layer].append(v_BTHD)
                first = 0 if num_left_chunks < 0 else max(0, len(keys[layer]) - 1 - num_left_chunks)
                k_BKHD = torch.cat(keys[layer][first:], dim=1)
                v_BKHD = torch.cat(values[layer][first:], dim=1)
                if window_frames is not None:
                    seen = window_frames + chunk.shape[1]
                    k_BKHD, v_BKHD = k_BKHD[:, -seen:], v_BKHD[:, -seen:]
                x_BTD = x_BTD + self._attend(layer, q_BTHD, k_BKHD, v_BKHD, None)
                x_BTD, tails[layer] = self._convolve(layer, x_BTD, tails[layer])
            heard += chunk.shape[1]
            outputs.append(self._log_probs(x_BTD))
        return outputs

    def _project_in(
        self, layer: int, x_BTD: Tensor, offset: int | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, frames = x_BTD.shape[:2]
        shape = (batch, frames, -1, self.config.head_dim)
        query, key, value = (
            (x_BTD @ weight[layer].T).view(shape) for weight in (self.query, self.key, self.value)
        )
        first_B = torch.as_tensor(offset, device=x_BTD.device).expand(batch)
        position_BT = first_B.unsqueeze(1) + torch.arange(frames, device=x_BTD.device)
        return query, key + position_BT.mul(0.37).sin().to(key.dtype)[..., None, None], value

    def _attend(
        self, layer: int, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, valid_BK: Any
    ) -> Tensor:
        group = self.num_heads // self.config.n_kv_head
        k_BKHD, v_BKHD = (x.repeat_interleave(group, dim=2) for x in (k_BKHD, v_BKHD))
        score_BHTK = torch.einsum("bthd,bkhd->bhtk", q_BTHD, k_BKHD) / self.config.head_dim**0.5
        if valid_BK is not None:
            score_BHTK = score_BHTK.masked_fill(~valid_BK[:, None, None], float("-inf"))
        mixed = torch.einsum("bhtk,bkhd->bthd", score_BHTK.softmax(-1), v_BKHD)
        return mixed.flatten(2) @ self.project[layer].T

    def _convolve(self, layer: int, x_BTD: Tensor, tail_BKD: Tensor) -> tuple[Tensor, Tensor]:
        window_BSD = torch.cat((tail_BKD, x_BTD), dim=1)
        frames_BTDK = window_BSD.unfold(1, self.config.kernel_size, 1)
        mixed_BTD = (frames_BTDK * self.kernel[layer]).sum(-1).tanh()
        return x_BTD + mixed_BTD, window_BSD[:, window_BSD.shape[1] - tail_BKD.shape[1] :]

    def _log_probs(self, x_BTD: Tensor) -> Tensor:
        return (x_BTD @ self.output.T).log_softmax(-1)
