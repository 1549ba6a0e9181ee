"""Fused device operations in the Triton language, each beside the PyTorch code that defines it.

Every function runs anywhere: on a CUDA tensor its kernel, elsewhere its definition. A kernel is
tested against the definition, on a GPU or in Triton's interpreter.
"""

from oasr_backend.kernels.attention import paged_rel_attention
from oasr_backend.kernels.convolution import gated_causal_convolution
from oasr_backend.kernels.ctc import best_tokens
from oasr_backend.kernels.norm import add_layer_norm
from oasr_backend.kernels.operands import AttentionTables, ConvolutionWeights
from oasr_backend.kernels.subsampling import convolution_relu

__all__ = [
    "AttentionTables",
    "ConvolutionWeights",
    "add_layer_norm",
    "best_tokens",
    "convolution_relu",
    "gated_causal_convolution",
    "paged_rel_attention",
]
