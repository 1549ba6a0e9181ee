"""Compares a batched prefix beam search of 32 streams with plain Python, stream after stream.

Both decode the same chunks in turns and must end with the same tokens. The log-probs imitate
speech: blank wins most frames, one frame in five holds a clear token, noise lies under both.

    python -m benchmarks.prefix_beam [--repeats N] [--threads N]
"""

from __future__ import annotations

import math
import time
from collections import defaultdict

import torch

from benchmarks.report import Figure, Report, alternating_ms, run_alone
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder, StreamState

STREAMS, FRAMES, CLASSES, BEAM = 32, 16, 5000, 10
_LOG_ZERO = -math.inf
Prefix = tuple[int, ...]


def speech_like(generator: torch.Generator) -> torch.Tensor:
    logits_NTV = torch.randn((STREAMS, FRAMES, CLASSES), generator=generator) * 1.5
    logits_NTV[..., 0] += 9.0
    token_NT1 = torch.randint(1, CLASSES, (STREAMS, FRAMES, 1), generator=generator)
    spoken_NT1 = torch.rand((STREAMS, FRAMES, 1), generator=generator) < 0.2
    logits_NTV.scatter_add_(2, token_NT1, spoken_NT1 * 13.0)
    return torch.log_softmax(logits_NTV, dim=-1)


def _log_add(a: float, b: float) -> float:
    low, high = (a, b) if a < b else (b, a)
    return high if low == _LOG_ZERO else high + math.log1p(math.exp(low - high))


class PlainPrefixBeam:
    """One stream: a dictionary from prefix to its (blank, token) pair, frame by frame."""

    def __init__(self) -> None:
        self.beam: list[tuple[Prefix, tuple[float, float]]] = [((), (0.0, _LOG_ZERO))]

    def decode_chunk(self, log_probs_TV: torch.Tensor) -> None:
        best_TW, id_TW = log_probs_TV.topk(BEAM, dim=-1)
        for log_probs, ids in zip(best_TW.tolist(), id_TW.tolist(), strict=True):
            self._frame(list(zip(ids, log_probs, strict=True)))

    def _frame(self, candidates: list[tuple[int, float]]) -> None:
        grown: dict[Prefix, list[float]] = defaultdict(lambda: [_LOG_ZERO, _LOG_ZERO])
        for prefix, (blank, token) in self.beam:
            total, last = _log_add(blank, token), prefix[-1] if prefix else -1
            for candidate, log_prob in candidates:
                if candidate == 0:
                    pair = grown[prefix]
                    pair[0] = _log_add(pair[0], total + log_prob)
                    continue
                if candidate == last:
                    pair = grown[prefix]
                    pair[1] = _log_add(pair[1], token + log_prob)
                start = blank if candidate == last else total
                longer = (*prefix, candidate)
                pair = grown[longer]
                pair[1] = _log_add(pair[1], start + log_prob)
        ranked = sorted(grown.items(), key=lambda item: _log_add(*item[1]), reverse=True)
        self.beam = [(prefix, (pair[0], pair[1])) for prefix, pair in ranked[:BEAM]]


class Contest:
    """The three ways to decode a chunk of all streams; each keeps its own state."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._chunk_NTV = torch.empty(0)
        self.plain = [PlainPrefixBeam() for _ in range(STREAMS)]
        self.batched = GpuStreamingDecoder(GpuDecoderConfig(beam_size=BEAM))
        self.greedy = GpuStreamingDecoder(GpuDecoderConfig(decoder="greedy"))
        self.batched_states = _open(self.batched)
        self.greedy_states = _open(self.greedy)

    def next_chunk(self) -> None:
        self._chunk_NTV = speech_like(self._generator)

    def run_plain(self) -> float:
        """The seconds that it takes; the other two tell theirs as well."""
        start_s = time.perf_counter()
        for search, log_probs_TV in zip(self.plain, self._chunk_NTV, strict=True):
            search.decode_chunk(log_probs_TV)
        return time.perf_counter() - start_s

    def run_batched(self) -> float:
        return self._run(self.batched, self.batched_states)

    def run_greedy(self) -> float:
        return self._run(self.greedy, self.greedy_states)

    def _run(self, decoder: GpuStreamingDecoder, states: list[StreamState]) -> float:
        start_s = time.perf_counter()
        decoder.decode_chunk_batch(self._chunk_NTV, states)
        decoder.best_batch(states)
        return time.perf_counter() - start_s

    def check_equal(self) -> None:
        best = self.batched.best_batch(self.batched_states)
        for hypothesis, search in zip(best, self.plain, strict=True):
            if hypothesis.tokens != search.beam[0][0]:
                raise RuntimeError("the batched search and the plain one disagree")


def _open(decoder: GpuStreamingDecoder) -> list[StreamState]:
    return [decoder.create_state(1, CLASSES) for _ in range(STREAMS)]


def measure(repeats: int) -> Report:
    contest = Contest(torch.Generator().manual_seed(0))
    ways = {
        "plain": contest.run_plain,
        "batched": contest.run_batched,
        "greedy": contest.run_greedy,
    }
    times_ms = alternating_ms(ways, repeats=repeats, prepare=contest.next_chunk)
    contest.check_equal()
    speed_up = [p / b for p, b in zip(times_ms["plain"], times_ms["batched"], strict=True)]
    configuration = {
        "streams": STREAMS,
        "frames": FRAMES,
        "classes": CLASSES,
        "beam_size": BEAM,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    figures = [Figure(f"{name}, one chunk", "ms", values) for name, values in times_ms.items()]
    figures.append(Figure("batched over plain", "times as fast", speed_up, target=5.0))
    return Report("prefix_beam", configuration, figures)


if __name__ == "__main__":
    run_alone(measure, description=__doc__, repeats=30)
