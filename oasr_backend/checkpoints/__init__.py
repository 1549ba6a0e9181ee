"""Checkpoint directories of other toolkits, read as they are."""

from oasr_backend.checkpoints.wenet import Checkpoint, load_wenet

__all__ = ["Checkpoint", "load_wenet"]
