"""Checkpoints of other toolkits, read as they are: one reader for each kind."""

from oasr_backend.checkpoints.base import Checkpoint, CheckpointInfo, OpenCheckpoint, Reader
from oasr_backend.checkpoints.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointInfo", "OpenCheckpoint", "Reader", "open_checkpoint"]
