"""The served Conformer as one graph of dense operators for one stream, to be exported to ONNX.

The equations and folded weights are those of the loaded model; what differs is the state, which
sherpa-onnx keeps as dense tensors in the layout of WeNet's own export:

    attn_cache  (layers, heads, R, 2 * C)  keys, then values, of the last R frames
    conv_cache  (layers, 1, D, K - 1)      what the depthwise convolutions still see

Beside WeNet's own export this graph does less: the query, key and value products are one, positions
are looked up and not projected in each chunk, and no past frame passes a gate twice.

Shapes: W feature frames of a window, F mel bins, T frames of a chunk, R frames of history,
S = R + T keys, D model, H heads, C head dimension, E = 2 * C, K kernel, V vocabulary; X and Y are
widths of a product, G is the query, key and value heads together.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasr_backend.models import AcousticModel, CtcHead
from oasr_backend.models.conformer import ConformerEncoder, ConformerLayer
from oasr_backend.models.layers import (
    CausalConvolution,
    Conv2dSubsampling,
    FeedForward,
    RelPositionAttention,
)

#: As many positions as WeNet's own table has; a stream has to end before they are used up.
NUM_POSITIONS = 5000


class Keys(NamedTuple):
    """Which keys a chunk sees: the table's rows of their positions, 0 or -inf for each."""

    first: Tensor
    end: Tensor
    bias_S: Tensor


class Product(nn.Module):
    """A linear layer whose weight needs no transposition: (T, X) to (T, Y)."""

    def __init__(self, weight_YX: Tensor, bias_Y: Tensor) -> None:
        super().__init__()
        self.weight_XY = nn.Parameter(weight_YX.detach().t().contiguous())
        self.bias_Y = nn.Parameter(bias_Y.detach().clone())

    @classmethod
    def of(cls, served: nn.Linear) -> Product:
        return cls(served.weight, served.bias)

    def forward(self, x_TX: Tensor) -> Tensor:
        return torch.matmul(x_TX, self.weight_XY) + self.bias_Y


class DenseSubsampling(nn.Module):
    """(1, W, F) normalised features to (T, D)."""

    def __init__(self, served: Conv2dSubsampling, num_mel_bins: int) -> None:
        super().__init__()
        self.stages = served.stages
        # The served columns are (mel, channel); these are in the order of the convolution's output.
        num_bins = served.kind.output_frames(num_mel_bins)
        weight_DFC = served.project.weight.unflatten(1, (num_bins, -1))
        self.project = Product(weight_DFC.transpose(1, 2).flatten(1), served.project.bias)

    def forward(self, features_1WF: Tensor) -> Tensor:
        x_1CTF = features_1WF.unsqueeze(1)
        for convolution in self.stages:
            x_1CTF = F.relu(convolution(x_1CTF))
        projected_TD: Tensor = self.project(x_1CTF.squeeze(0).transpose(0, 1).flatten(1))
        return projected_TD


class DenseAttention(nn.Module):
    """Attention over a dense cache, with WeNet's position term from a table."""

    position_HPC: Tensor

    def __init__(self, served: RelPositionAttention, *, num_history: int) -> None:
        """Raises ValueError for shared K/V heads, for which the cache's layout has no place."""
        super().__init__()
        if served.num_kv_heads != served.num_heads:
            raise ValueError(
                f"{served.num_kv_heads} K/V heads for {served.num_heads} heads; give a checkpoint "
                "with as many of both"
            )
        self.num_heads, self.head_dim = served.num_heads, served.head_dim
        self.qkv, self.project = Product.of(served.qkv), Product.of(served.project)
        # The score's factor rides on the query.
        scale, num_query = self.head_dim**-0.5, self.num_heads * self.head_dim
        self.qkv.weight_XY.data[:, :num_query] *= scale
        self.qkv.bias_Y.data[:num_query] *= scale
        self.bias_u_H1C = nn.Parameter(served.bias_u_HC.detach().unsqueeze(1) * scale)
        self.bias_v_H1C = nn.Parameter(served.bias_v_HC.detach().unsqueeze(1) * scale)
        position_HPC = served.position_PHC[:NUM_POSITIONS].transpose(0, 1)
        # Frames before the stream are masked, but they are looked up too.
        padded_HPC = F.pad(position_HPC, (0, 0, num_history, 0)).contiguous()
        self.register_buffer("position_HPC", padded_HPC)

    def forward(self, normed_TD: Tensor, cache_HRE: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """What attention adds to the residual, and the chunk's own part of the cache."""
        qkv_GTC = self.qkv(normed_TD).unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        q_HTC, k_HTC, v_HTC = qkv_GTC.split(self.num_heads)
        kv_HTE = torch.cat((k_HTC, v_HTC), dim=-1)
        kv_HSE = torch.cat((cache_HRE, kv_HTE), dim=1)
        k_HSC, v_HSC = kv_HSE.split(self.head_dim, dim=-1)
        p_HSC = self.position_HPC[:, keys.first : keys.end]
        content_HTS = torch.matmul(q_HTC + self.bias_u_H1C, k_HSC.transpose(1, 2))
        place_HTS = torch.matmul(q_HTC + self.bias_v_H1C, p_HSC.transpose(1, 2))
        weights_HTS = torch.softmax(content_HTS + place_HTS + keys.bias_S, dim=-1)
        mixed_TD = torch.matmul(weights_HTS, v_HSC).transpose(0, 1).flatten(1)
        return self.project(mixed_TD), kv_HTE


class DenseConvolution(nn.Module):
    """The convolution module; its cache holds gated frames less what the gate makes of zeros."""

    def __init__(self, served: CausalConvolution) -> None:
        super().__init__()
        self.gate, self.project = Product.of(served.gate), Product.of(served.project)
        self.rest_D1 = nn.Parameter(served.rest_D.detach().unsqueeze(1))
        self.weight_D1K = nn.Parameter(served.depthwise.weight.detach().squeeze(2))
        self.bias_D = served.depthwise.bias
        self.norm, self.activation = served.inner_norm, served.activation

    def forward(self, normed_TD: Tensor, cache_1DK: Tensor) -> tuple[Tensor, Tensor]:
        """What the module adds to the residual, and the frames whose end is the next cache."""
        gated_DT = F.glu(self.gate(normed_TD).t(), dim=0) - self.rest_D1
        window_1DS = torch.cat((cache_1DK, gated_DT.unsqueeze(0)), dim=2)
        mixed_1DT = F.conv1d(
            window_1DS, self.weight_D1K, self.bias_D, groups=self.weight_D1K.shape[0]
        )
        mixed_TD = mixed_1DT.squeeze(0).t()
        if self.norm is not None:
            mixed_TD = self.norm(mixed_TD)
        return self.project(self.activation(mixed_TD)), window_1DS


class DenseFeedForward(nn.Module):
    def __init__(self, served: FeedForward) -> None:
        super().__init__()
        self.norm, self.activation = served.norm, served.activation
        self.expand, self.contract = Product.of(served.expand), Product.of(served.contract)

    def forward(self, x_TD: Tensor) -> Tensor:
        """What the block adds to the residual."""
        change_TD: Tensor = self.contract(self.activation(self.expand(self.norm(x_TD))))
        return change_TD


class DenseLayer(nn.Module):
    def __init__(self, served: ConformerLayer, *, num_history: int) -> None:
        super().__init__()
        self.macaron = None if served.macaron is None else DenseFeedForward(served.macaron)
        self.attention_norm = served.attention.norm
        self.attention = DenseAttention(served.attention, num_history=num_history)
        self.convolution_norm = served.convolution.norm
        self.convolution = DenseConvolution(served.convolution)
        self.feed_forward = DenseFeedForward(served.feed_forward)
        self.norm = served.norm

    def forward(
        self, x_TD: Tensor, kv_HRE: Tensor, conv_1DK: Tensor, keys: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The residual behind the layer, and what the caches take from it."""
        if self.macaron is not None:
            x_TD = x_TD + self.macaron(x_TD)
        change_TD, kv_HTE = self.attention(self.attention_norm(x_TD), kv_HRE, keys)
        x_TD = x_TD + change_TD
        change_TD, window_1DS = self.convolution(self.convolution_norm(x_TD), conv_1DK)
        x_TD = x_TD + change_TD
        return self.norm(x_TD + self.feed_forward(x_TD)), kv_HTE, window_1DS


class DenseModel(nn.Module):
    """From features before normalisation to log-probabilities: the graph that the peer runs."""

    def __init__(self, served: AcousticModel, *, num_history: int, num_mel_bins: int) -> None:
        """`served` holds its position tables already, for NUM_POSITIONS or more."""
        super().__init__()
        encoder = cast(ConformerEncoder, served.encoder)
        self.frontend = served.frontend
        self.subsampling = DenseSubsampling(encoder.subsampling, num_mel_bins)
        self.layers = nn.ModuleList(
            DenseLayer(cast(ConformerLayer, layer), num_history=num_history)
            for layer in encoder.layers
        )
        self.norm = encoder.norm
        self.output = Product.of(cast(CtcHead, served.heads["ctc"]).output)

    def forward(
        self,
        x: Tensor,
        offset: Tensor,
        required_cache_size: Tensor,
        attn_cache: Tensor,
        conv_cache: Tensor,
        attn_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(1, W, F) features and the state to (1, T, V) log-probabilities and the next state.

        `offset` (1) counts the frames of the stream and `required_cache_size` (1), the history,
        with which it starts. `attn_mask` (1, 1, S) is false for keys before the stream.
        """
        x_TD = self.subsampling(self.frontend.normalise(x))
        first = (offset - required_cache_size).squeeze(0)
        keys = Keys(first, first + attn_mask.shape[-1], _bias(attn_mask.flatten()))
        kv: list[Tensor] = []
        conv: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x_TD, kv_HTE, window_1DS = layer(x_TD, attn_cache[index], conv_cache[index], keys)
            kv.append(kv_HTE)
            conv.append(window_1DS)
        log_probs_TV = torch.log_softmax(self.output(self.norm(x_TD)), dim=-1)
        # All layers at once: fewer operators than a slice for each.
        next_attn = torch.cat((attn_cache[:, :, x_TD.shape[0] :], torch.stack(kv)), dim=2)
        next_conv = torch.stack(conv)[..., x_TD.shape[0] :]
        return log_probs_TV.unsqueeze(0), next_attn, next_conv


def _bias(mask_S: Tensor) -> Tensor:
    return torch.where(mask_S, 0.0, float("-inf"))
