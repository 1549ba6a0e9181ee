"""WeNet's Conformer, one stream, chunk by chunk, as its equations read: slow, obvious, an oracle.

Reads the weights under their own names and shares no code with the served encoder. Caches are
dense tensors that grow by concatenation and are cut to the allowed history after every chunk.

Shapes: W feature frames of a window, F mel bins, T frames of a chunk, K keys, D model, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from oasr_backend.features import GlobalCmvn, load_cmvn

_NUM_POSITIONS = 5000


@dataclass
class DenseState:
    """One stream's state between chunks: each layer's keys, values and convolution input."""

    offset: int = 0
    keys_KHC: dict[int, Tensor] = field(default_factory=dict)
    values_KHC: dict[int, Tensor] = field(default_factory=dict)
    conv_TD: dict[int, Tensor] = field(default_factory=dict)


class DenseConformer:
    """`log_probs` of one window of features; the caller's DenseState holds what it remembers."""

    def __init__(self, directory: Path, *, num_left_frames: int, device: str = "cpu") -> None:
        """`num_left_frames` of history are seen; -1 sees all."""
        config = yaml.safe_load((directory / "train.yaml").read_text(encoding="utf-8"))
        loaded = torch.load(directory / "final.pt", map_location=device, weights_only=True)
        self._weights: dict[str, Tensor] = {
            name: value.float() for name, value in loaded.get("model", loaded).items()
        }
        self._options: dict[str, Any] = config["encoder_conf"]
        self._num_left_frames = num_left_frames
        self._model_dim = int(self._options["output_size"])
        self._sinusoid_PD = _sinusoid(self._model_dim).to(device)
        self._cmvn: GlobalCmvn = load_cmvn(directory / "global_cmvn").to(device)

    @torch.inference_mode()
    def log_probs(self, features_WF: Tensor, state: DenseState) -> Tensor:
        """(W, F) raw log-mel features to (T, V); `state` moves on by T frames."""
        x_TD = self._subsample(self._cmvn(features_WF.unsqueeze(0)).squeeze(0))
        for layer in range(int(self._options["num_blocks"])):
            x_TD = self._layer(layer, x_TD, state)
        state.offset += x_TD.shape[0]
        encoded_TD = self._norm("encoder.after_norm", x_TD)
        return F.log_softmax(self._linear("ctc.ctc_lo", encoded_TD), dim=-1)

    def _subsample(self, features_WF: Tensor) -> Tensor:
        x_CTF = features_WF.unsqueeze(0)
        for stage, stride in enumerate(_STRIDES[self._options["input_layer"]]):
            name = f"encoder.embed.conv.{2 * stage}"
            weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
            x_CTF = F.relu(F.conv2d(x_CTF, weight, bias, stride=stride))
        flat_TX = x_CTF.transpose(0, 1).flatten(1)
        is_conv2d = "encoder.embed.out.0.weight" in self._weights
        x_TD = self._linear("encoder.embed.out.0" if is_conv2d else "encoder.embed.linear", flat_TX)
        return x_TD * math.sqrt(self._model_dim)

    def _layer(self, layer: int, x_TD: Tensor, state: DenseState) -> Tensor:
        name = f"encoder.encoders.{layer}"
        is_macaron = bool(self._options.get("macaron_style", True))
        scale = 0.5 if is_macaron else 1.0
        if is_macaron:
            normed_TD = self._norm(f"{name}.norm_ff_macaron", x_TD)
            x_TD = x_TD + scale * self._feed_forward(f"{name}.feed_forward_macaron", normed_TD)
        x_TD = x_TD + self._attention(layer, self._norm(f"{name}.norm_mha", x_TD), state)
        x_TD = x_TD + self._convolution(layer, self._norm(f"{name}.norm_conv", x_TD), state)
        normed_TD = self._norm(f"{name}.norm_ff", x_TD)
        x_TD = x_TD + scale * self._feed_forward(f"{name}.feed_forward", normed_TD)
        return self._norm(f"{name}.norm_final", x_TD)

    def _feed_forward(self, name: str, x_TD: Tensor) -> Tensor:
        return self._linear(f"{name}.w_2", F.silu(self._linear(f"{name}.w_1", x_TD)))

    def _attention(self, layer: int, x_TD: Tensor, state: DenseState) -> Tensor:
        name = f"encoder.encoders.{layer}.self_attn"
        q_THC, k_THC, v_THC = (self._heads(f"{name}.linear_{part}", x_TD) for part in "qkv")
        k_KHC = torch.cat((state.keys_KHC.get(layer, k_THC[:0]), k_THC))
        v_KHC = torch.cat((state.values_KHC.get(layer, v_THC[:0]), v_THC))
        first = state.offset + x_TD.shape[0] - k_KHC.shape[0]
        sinusoid_KD = self._sinusoid_PD[first : first + k_KHC.shape[0]]
        p_KHC = self._heads(f"{name}.linear_pos", sinusoid_KD)
        q_u_HTC = (q_THC + self._weights[f"{name}.pos_bias_u"]).transpose(0, 1)
        q_v_HTC = (q_THC + self._weights[f"{name}.pos_bias_v"]).transpose(0, 1)
        scores_HTK = q_u_HTC @ k_KHC.permute(1, 2, 0) + q_v_HTC @ p_KHC.permute(1, 2, 0)
        weights_HTK = (scores_HTK / math.sqrt(q_THC.shape[-1])).softmax(-1)
        mixed_THC = (weights_HTK @ v_KHC.transpose(0, 1)).transpose(0, 1)
        kept = self._num_kept(k_KHC.shape[0])
        state.keys_KHC[layer] = k_KHC[k_KHC.shape[0] - kept :]
        state.values_KHC[layer] = v_KHC[v_KHC.shape[0] - kept :]
        return self._linear(f"{name}.linear_out", mixed_THC.flatten(1))

    def _num_kept(self, num_keys: int) -> int:
        return num_keys if self._num_left_frames < 0 else min(num_keys, self._num_left_frames)

    def _convolution(self, layer: int, x_TD: Tensor, state: DenseState) -> Tensor:
        """The cache holds what enters the gate; before the stream stand zero frames."""
        name = f"encoder.encoders.{layer}.conv_module"
        depthwise = self._weights[f"{name}.depthwise_conv.weight"]
        past = depthwise.shape[-1] - 1
        x_TD = torch.cat((state.conv_TD.get(layer, x_TD.new_zeros(past, x_TD.shape[1])), x_TD))
        state.conv_TD[layer] = x_TD[-past:]
        gated_TD = F.glu(self._linear(f"{name}.pointwise_conv1", x_TD), dim=-1)
        bias = self._weights.get(f"{name}.depthwise_conv.bias")
        mixed_DT = F.conv1d(gated_TD.t(), depthwise, bias, groups=depthwise.shape[0])
        normed_TD = self._conv_norm(f"{name}.norm", mixed_DT.t())
        return self._linear(f"{name}.pointwise_conv2", F.silu(normed_TD))

    def _conv_norm(self, name: str, x_TD: Tensor) -> Tensor:
        if self._options.get("cnn_module_norm", "batch_norm") == "layer_norm":
            return self._norm(name, x_TD)
        mean, variance = (self._weights[f"{name}.running_{part}"] for part in ("mean", "var"))
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.batch_norm(x_TD, mean, variance, weight, bias, eps=1e-5)

    def _heads(self, name: str, x_TD: Tensor) -> Tensor:
        num_heads = int(self._options["attention_heads"])
        return self._linear(name, x_TD).view(x_TD.shape[0], num_heads, -1)

    def _linear(self, name: str, x_TD: Tensor) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        if weight.dim() == 3:
            weight = weight.squeeze(-1)
        return F.linear(x_TD, weight, self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x_TD, (x_TD.shape[-1],), weight, bias, eps=1e-5)


def dense_log_probs(model: DenseConformer, features_TF: Tensor, *, chunk_size: int) -> Tensor:
    """(T, F) features of a whole stream, 4x subsampled, to (T', V); the last window is short."""
    state, stride = DenseState(), 4 * chunk_size
    # One encoder frame needs seven feature frames.
    window, last_start = stride + 3, features_TF.shape[0] - 7
    starts = range(0, last_start + 1, stride)
    return torch.cat([model.log_probs(features_TF[i : i + window], state) for i in starts])


_STRIDES = {"conv2d": (2, 2), "conv2d6": (2, 3), "conv2d8": (2, 2, 2)}


def _sinusoid(model_dim: int) -> Tensor:
    position_P1 = torch.arange(_NUM_POSITIONS, dtype=torch.float32).unsqueeze(1)
    exponent_D = torch.arange(0, model_dim, 2, dtype=torch.float32) / model_dim
    angle_PD = position_P1 * torch.exp(exponent_D * -math.log(10000.0))
    return torch.stack((angle_PD.sin(), angle_PD.cos()), dim=-1).flatten(1)
