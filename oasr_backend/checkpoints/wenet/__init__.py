"""WeNet's U2 and U2++ checkpoints: a folder with `train.yaml`, `final.pt` and `units.txt`."""

from oasr_backend.checkpoints.wenet.reader import WenetReader

__all__ = ["WenetReader"]
