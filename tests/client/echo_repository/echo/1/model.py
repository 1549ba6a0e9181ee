"""Counts samples per stream: the text is "heard N". It fails on request, so that clients can be
tested against a real server without a slow or broken model.

Parameters of START: `sleep_ms` delays each answer, from the `sleep_from`-th on,
`fail_at` makes the n-th request INTERNAL,
`label` is put before the text, `word_times` adds words with a long pause before the last,
`longest` is the number of samples after which a stream ends with finish_reason "length".
"""

import json
import math
import time

import numpy as np
import triton_python_backend_utils as pb_utils

MAX_STREAMS = 4
FORGET_S = 3.0
KNOWN = {"sleep_ms", "sleep_from", "fail_at", "label", "word_times", "longest"}


class TritonPythonModel:
    def initialize(self, _args):
        self.streams = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            return self.step(request)
        except pb_utils.TritonModelException as error:
            message, code = error.args
            return pb_utils.InferenceResponse([], error=pb_utils.TritonError(message, code))

    def step(self, request):
        key, flags = request.correlation_id(), request.flags()
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.open(key, json.loads(request.parameters() or "{}"))
        if key not in self.streams:
            refuse("unknown stream: send START first", pb_utils.TritonError.INVALID_ARG)
        stream = self.streams[key]
        stream["requests"] += 1
        if stream["requests"] >= stream["options"].get("sleep_from", 1):
            time.sleep(stream["options"].get("sleep_ms", 0) / 1000)
        stream["used_s"] = time.monotonic()
        if stream["requests"] == stream["options"].get("fail_at"):
            del self.streams[key]
            refuse("the step failed", pb_utils.TritonError.INTERNAL)
        samples = audio(request)
        stream["samples"] += samples.size
        stream["sum"] += float(np.abs(samples).sum())
        is_final = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        if is_final:
            del self.streams[key]
        return self.respond(request, stream, is_final)

    def open(self, key, options):
        now_s = time.monotonic()
        for old in [k for k, s in self.streams.items() if now_s - s["used_s"] > FORGET_S]:
            del self.streams[old]
        unknown = sorted(set(options) - KNOWN)
        if unknown:
            refuse(f"unknown parameter {unknown[0]!r}", pb_utils.TritonError.INVALID_ARG)
        if key not in self.streams and len(self.streams) >= MAX_STREAMS:
            refuse(f"all {MAX_STREAMS} streams are in use", pb_utils.TritonError.UNAVAILABLE)
        self.streams[key] = {
            "samples": 0,
            "sum": 0.0,
            "requests": 0,
            "used_s": now_s,
            "options": options,
        }

    def respond(self, request, stream, is_final):
        decoded = min(stream["samples"], stream["options"].get("longest", math.inf))
        is_full = decoded < stream["samples"]
        text = f"{stream['options'].get('label', '')} heard {decoded}".strip()
        document = {
            "text": text,
            "is_final": is_final or is_full,
            "finish_reason": "length" if is_full else "end" if is_final else None,
            "audio_s": stream["samples"] / 16000,
            "decoded_s": decoded / 16000,
            "mean": stream["sum"] / max(1, stream["samples"]),
            "live_streams": len(self.streams),
            "requests": stream["requests"],
            "options": stream["options"],
        }
        if stream["options"].get("word_times"):
            document["words"] = words(text)
        tensors = [string("TRANSCRIPTS", text)]
        if "RESULT" in request.requested_output_names():
            tensors.append(string("RESULT", json.dumps(document)))
        return pb_utils.InferenceResponse(tensors)


def audio(request):
    wav = pb_utils.get_input_tensor_by_name(request, "WAV")
    pcm16 = pb_utils.get_input_tensor_by_name(request, "PCM16")
    if (wav is None) == (pcm16 is None):
        refuse("send exactly one of WAV and PCM16", pb_utils.TritonError.INVALID_ARG)
    samples = wav.as_numpy()[0] if wav is not None else pcm16.as_numpy()[0] / 32768
    if not np.isfinite(samples).all():
        refuse("WAV holds non-finite samples", pb_utils.TritonError.INVALID_ARG)
    return samples


def words(text):
    said, number = text.rsplit(" ", 1)
    first = {"word": said, "start_s": 0.0, "end_s": 0.25, "confidence": 1.0}
    return [first, {"word": number, "start_s": 1.25, "end_s": 1.5, "confidence": 1.0}]


def string(name, text):
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def refuse(message, code):
    error = pb_utils.TritonModelException(message)
    error.args = (message, code)
    raise error
