"""Building blocks of streaming encoders, in inference form."""

from oasr_backend.models.layers.attention import RelPositionAttention
from oasr_backend.models.layers.convolution import CausalConvolution
from oasr_backend.models.layers.feed_forward import FeedForward
from oasr_backend.models.layers.positional import sinusoid_table
from oasr_backend.models.layers.subsampling import SUBSAMPLING_KINDS, Conv2dSubsampling

__all__ = [
    "SUBSAMPLING_KINDS",
    "CausalConvolution",
    "Conv2dSubsampling",
    "FeedForward",
    "RelPositionAttention",
    "sinusoid_table",
]
