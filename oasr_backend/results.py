"""The RESULT document: what a request that asks for it is told beyond the text."""

from __future__ import annotations

from typing import Any

from oasr_backend.streams import Stream

#: Grows by one with every change that a reader could notice.
RESULT_VERSION = 1


def result_document(text: str, stream: Stream) -> dict[str, Any]:
    """JSON-ready. `audio_s` counts the seconds received, not the silence that pads the end."""
    return {
        "version": RESULT_VERSION,
        "text": text,
        "is_final": stream.finish_reason is not None,
        "finish_reason": stream.finish_reason,
        "audio_s": round(stream.audio_s, 3),
        "num_frames": stream.num_encoder_frames,
    }
