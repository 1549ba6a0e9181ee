"""Tells which instructions are in force in this process, and the demo model's results here.

    python -m tests.instruction_sets.witness

The answer is one line of JSON, behind the lines in which MKL and oneDNN name their instructions.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import soundfile
import torch

from oasr_backend.config import ServingConfig
from oasr_backend.options import StreamOptions
from oasr_backend.streaming.assemble import load_engine
from oasr_backend.types import AudioChunk
from tests.conftest import DEMO_DIR, read_clips
from tests.result_schema import check_document

NUM_CLIPS = 3
OPTIONS = StreamOptions(
    decoder="prefix_beam", nbest=4, word_times=True, endpoint=True, rescoring=True
)


def make_libraries_speak() -> None:
    """One product and one convolution, for which each library prints what it runs on."""
    speak_mkl = torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON)
    speak_onednn = torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)
    with speak_mkl, speak_onednn, torch.inference_mode():
        torch.ones(64, 64) @ torch.ones(64, 64)
        torch.conv2d(torch.ones(8, 64, 33, 40), torch.ones(64, 64, 3, 3))


def documents() -> list[dict[str, Any]]:
    """The RESULT of some clips, each alone and then all of them together."""
    engine = load_engine(DEMO_DIR, ServingConfig(), device="cpu")
    clips = [
        soundfile.read(clip.path, dtype="float32")[0]
        for clip in read_clips(DEMO_DIR / "testset")[:NUM_CLIPS]
    ]
    chunks = [
        AudioChunk(
            number, samples_S, is_first=True, is_last=True, options=OPTIONS, wants_result=True
        )
        for number, samples_S in enumerate(clips)
    ]
    alone = [engine.process([chunk])[0] for chunk in chunks]
    return [check_document(one.document) for one in [*alone, *engine.process(chunks)]]


def main() -> None:
    make_libraries_speak()
    found = {
        "aten": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "documents": documents(),
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
