"""Audio in, normalised features out: buffering, resampling, frame arithmetic, front ends."""

from oasr_backend.features.audio_buffer import AudioBuffer, WindowFrames
from oasr_backend.features.base import FeaturePadding, Frontend
from oasr_backend.features.cmvn import GlobalCmvn, load_cmvn
from oasr_backend.features.codecs import decode_alaw, decode_mulaw
from oasr_backend.features.fbank import FbankConfig, LogMelFilterbank
from oasr_backend.features.geometry import FrameGeometry, WindowGeometry
from oasr_backend.features.icefall import ICEFALL_FBANK, IcefallFrontend
from oasr_backend.features.kaldi import KaldiFrontend
from oasr_backend.features.resample import MAX_RATE_HZ, MIN_RATE_HZ, StreamingResampler

__all__ = [
    "ICEFALL_FBANK",
    "MAX_RATE_HZ",
    "MIN_RATE_HZ",
    "AudioBuffer",
    "FbankConfig",
    "FeaturePadding",
    "FrameGeometry",
    "Frontend",
    "GlobalCmvn",
    "IcefallFrontend",
    "KaldiFrontend",
    "LogMelFilterbank",
    "StreamingResampler",
    "WindowFrames",
    "WindowGeometry",
    "decode_alaw",
    "decode_mulaw",
    "load_cmvn",
]
