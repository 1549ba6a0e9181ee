"""An encoder's step as one compiled graph, for serving on a CPU."""

from oasr_backend.compiled.choice import compiled_encoder, lacks_graph
from oasr_backend.compiled.encoder import SessionEncoder
from oasr_backend.compiled.files import GraphFiles

__all__ = ["GraphFiles", "SessionEncoder", "compiled_encoder", "lacks_graph"]
