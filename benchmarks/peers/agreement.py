"""How far apart the texts of the recognisers are: each recording of the demo, whole.

Both decode the same weights greedily. What may differ is rounding, int8 weights, and the end of a
recording, behind which ours pads one window of silence and the peer 0.8 s.
Texts of equal words can differ: where a unit is a space alone, the peer writes two of them.
"""

from __future__ import annotations

from typing import Any

from oasr_client.manifest import Reference, word_errors

from benchmarks.accuracy import recordings
from benchmarks.baseline import engine_text
from benchmarks.engine import Recogniser
from benchmarks.peers.choices import Choices
from benchmarks.peers.export import ExportedModel
from benchmarks.peers.recogniser import PeerRecogniser
from benchmarks.workload import CHUNK_SAMPLES, DEMO_DIRECTORY, read_audio
from oasr_backend.config import ServingConfig
from oasr_backend.streaming.assemble import load_engine

_QUICK_RECORDINGS = 4


def measure(exported: ExportedModel, choices: Choices) -> dict[str, Any]:
    """For each of the peer's models: word error rate against our texts, and how many are equal.

    "from references" are the error rates of all three against what was said.
    """
    spoken = recordings()[: _QUICK_RECORDINGS if choices.is_quick else None]
    engine = load_engine(DEMO_DIRECTORY, ServingConfig.of(max_streams=1), device="cpu")
    heard = {"ours": _texts(engine, spoken)}
    for name, model in exported.models().items():
        heard[name] = _texts(PeerRecogniser(exported, model, num_threads=1), spoken)
    ours = [Reference(one.audio, heard["ours"][one.audio]) for one in spoken]
    return {
        "recordings": len(spoken),
        "word error rate from references, %": {
            name: round(word_errors(spoken, texts).rate * 100, 2) for name, texts in heard.items()
        },
        "word error rate from ours, %": {
            name: round(word_errors(ours, heard[name]).rate * 100, 2) for name in exported.models()
        },
        "texts equal to ours": {
            name: sum(texts[one.audio] == one.text for one in ours)
            for name, texts in heard.items()
            if name != "ours"
        },
    }


def _texts(recogniser: Recogniser, spoken: list[Reference]) -> dict[Any, str]:
    texts = {}
    for one in spoken:
        samples_S = read_audio(one.audio)
        starts = range(0, samples_S.size, CHUNK_SAMPLES)
        chunks = [samples_S[start : start + CHUNK_SAMPLES] for start in starts]
        texts[one.audio] = engine_text(recogniser, chunks)
    return texts
