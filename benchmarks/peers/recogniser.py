"""sherpa-onnx in process, behind the call that the engine has: chunks in, texts out.

The settings are those that suit it and the checkpoint best: no endpoints, greedy search, no
dither, and mel bins up to the Nyquist frequency, as WeNet's features have them (its own default
stops 400 Hz below). The library turns samples in [-1, 1] into WeNet's 16-bit scale by itself.
`snip_edges` makes its frames start where WeNet's do; its server cannot be told so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.export import ExportedModel
from benchmarks.peers.packages import require
from benchmarks.workload import SAMPLE_RATE
from oasr_backend.types import AudioChunk

#: Silence behind the last sample, its server's default: an utterance then costs as many windows as
#: it costs the engine, which pads with one window of silence.
TAIL_S = 0.8


@dataclass(frozen=True)
class PeerResult:
    text: str
    error: None = None


class PeerRecogniser:
    """All streams of one process; `process` serves a round as `Engine.process` does."""

    def __init__(self, exported: ExportedModel, model: Path, *, num_threads: int) -> None:
        """`model` is one of the export's; `num_threads` share one stream's window."""
        self._recogniser = _recogniser(exported, model, num_threads=num_threads)
        self._streams: dict[str, Any] = {}
        self._tail_S = np.zeros(round(TAIL_S * SAMPLE_RATE), dtype=np.float32)

    def process(self, chunks: Sequence[AudioChunk]) -> list[PeerResult]:
        """One chunk of each stream; the texts so far, in the order of the chunks."""
        streams = [self._accept(chunk) for chunk in chunks]
        while ready := [stream for stream in streams if self._recogniser.is_ready(stream)]:
            self._recogniser.decode_streams(ready)
        texts = [self._recogniser.get_result(stream).text.strip() for stream in streams]
        for chunk in chunks:
            if chunk.is_last:
                del self._streams[chunk.stream_id]
        return [PeerResult(text) for text in texts]

    def close(self) -> None:
        """Forgets all streams."""
        self._streams.clear()

    def _accept(self, chunk: AudioChunk) -> Any:
        if chunk.is_first:
            self._streams[chunk.stream_id] = self._recogniser.create_stream()
        stream = self._streams[chunk.stream_id]
        stream.accept_waveform(SAMPLE_RATE, chunk.samples_S)
        if chunk.is_last:
            stream.accept_waveform(SAMPLE_RATE, self._tail_S)
            stream.input_finished()
        return stream


def _recogniser(exported: ExportedModel, model: Path, *, num_threads: int) -> Any:
    """The library's own recogniser: its Python wrapper does not pass on what the features need."""
    library = require("sherpa_onnx.lib._sherpa_onnx")
    configuration = library.OnlineRecognizerConfig(
        feat_config=library.FeatureExtractorConfig(
            sampling_rate=SAMPLE_RATE, feature_dim=80, high_freq=0.0, snip_edges=True
        ),
        model_config=library.OnlineModelConfig(
            wenet_ctc=library.OnlineWenetCtcModelConfig(
                model=str(model),
                chunk_size=exported.chunk_size,
                num_left_chunks=exported.num_left_chunks,
            ),
            tokens=str(exported.tokens),
            num_threads=num_threads,
            model_type="wenet_ctc",
            provider_config=library.ProviderConfig(provider="cpu"),
        ),
        endpoint_config=library.EndpointConfig(),
        enable_endpoint=False,
        decoding_method="greedy_search",
    )
    return library.OnlineRecognizer(configuration)
