"""Fused device operations in the Triton language, each beside the PyTorch code that defines it.

Every function runs anywhere: on a CUDA tensor its kernel, elsewhere its definition. A kernel is
tested against the definition, on a GPU or in Triton's interpreter.
"""

from oasr_backend.kernels.attention import paged_rel_attention
from oasr_backend.kernels.average import average_frames
from oasr_backend.kernels.bias_norm import bias_norm, bypass, norm_bypass
from oasr_backend.kernels.chunk_attention import attend_window, chunk_attention_weights
from oasr_backend.kernels.chunk_convolution import chunk_convolution, taps_first
from oasr_backend.kernels.convolution import gated_causal_convolution
from oasr_backend.kernels.ctc import best_tokens
from oasr_backend.kernels.front_end import (
    conv_next,
    convolution_swoosh,
    inner_channels_first,
)
from oasr_backend.kernels.norm import add_layer_norm
from oasr_backend.kernels.operands import (
    AttentionTables,
    ChunkConvolutionWeights,
    ConvNeXtWeights,
    ConvolutionWeights,
    HeadSizes,
    SlotRows,
)
from oasr_backend.kernels.roll import roll_rows
from oasr_backend.kernels.subsampling import convolution_relu
from oasr_backend.kernels.swoosh import swoosh_l, swoosh_r, tanh_gate

__all__ = [
    "AttentionTables",
    "ChunkConvolutionWeights",
    "ConvNeXtWeights",
    "ConvolutionWeights",
    "HeadSizes",
    "SlotRows",
    "add_layer_norm",
    "attend_window",
    "average_frames",
    "best_tokens",
    "bias_norm",
    "bypass",
    "chunk_attention_weights",
    "chunk_convolution",
    "conv_next",
    "convolution_relu",
    "convolution_swoosh",
    "gated_causal_convolution",
    "inner_channels_first",
    "norm_bypass",
    "paged_rel_attention",
    "roll_rows",
    "swoosh_l",
    "swoosh_r",
    "tanh_gate",
    "taps_first",
]
