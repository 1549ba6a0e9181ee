"""icefall's streaming Zipformer checkpoints: a weights file and `tokens.txt` beside it."""

from oasr_backend.checkpoints.icefall.reader import IcefallReader

__all__ = ["IcefallReader"]
