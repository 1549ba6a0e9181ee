"""Every stream's decoder, whatever its options ask for: one batched decode per kind and step.

A kind is a search with its beam size. Its decoder is made when a stream first asks for it, so that
a server whose streams all take the defaults has one, and pays for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from oasr_backend.cache import CtcStateCacheManager, StreamHandle
from oasr_backend.config import ServingConfig
from oasr_backend.decoders import GpuDecoderConfig, GpuStreamingDecoder, StreamState
from oasr_backend.decoders.base import Finish, Tail
from oasr_backend.decoders.bias.arpa import load_arpa
from oasr_backend.decoders.bias.base import PrefixScorer
from oasr_backend.decoders.bias.hotwords import HotwordScorer
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.bias.spelling import HotwordSpelling
from oasr_backend.decoders.config import DecoderName
from oasr_backend.decoders.second_pass.base import NoDecoder
from oasr_backend.decoders.second_pass.final_order import FinalOrder
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.device import to_device
from oasr_backend.errors import InvalidRequestError, StreamStateError, UnknownStreamError, shown
from oasr_backend.options import StreamOptions
from oasr_backend.text.tokenizer import Tokenizer
from oasr_backend.types import Hypothesis, StreamId

ReadT = TypeVar("ReadT")


def decoder_config(config: ServingConfig, blank_id: int) -> GpuDecoderConfig:
    """What a stream without options is decoded with."""
    return GpuDecoderConfig(
        decoder="prefix_beam" if config.defaults.decoder == "prefix_beam" else "greedy",
        beam_size=config.defaults.beam_size,
        blank_id=blank_id,
        blank_threshold=config.search.blank_threshold,
    )


def load_language_model(
    config: ServingConfig, tokenizer: Tokenizer, device: torch.device
) -> NgramScorer | None:
    """The server's n-gram model, if it has one. Raises ConfigError for one that does not fit."""
    if not config.search.lm_path:
        return None
    symbols = tokenizer.pieces(range(tokenizer.vocab_size))
    return NgramScorer(
        load_arpa(config.search.lm_path, symbols),
        weight=config.search.lm_weight,
        unit_bonus=config.search.lm_unit_bonus,
        device=device,
    )


class DecoderKind(NamedTuple):
    """What streams must have in common to be decoded together."""

    search: DecoderName
    beam_size: int
    has_hotwords: bool = False
    has_lm: bool = False

    @classmethod
    def of(cls, options: StreamOptions) -> DecoderKind:
        if options.decoder == "prefix_beam":
            return cls("prefix_beam", options.beam_size, bool(options.phrases), options.use_lm)
        return cls("greedy", 1)


@dataclass(frozen=True)
class _Decoder:
    """What serves the streams of one kind."""

    manager: CtcStateCacheManager
    hotwords: HotwordScorer | None


class StreamDecoders:
    """Implements what a `StreamContext` asks of decoder states. Streams are named by generation."""

    def __init__(
        self,
        config: GpuDecoderConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        device: torch.device,
        rescorer: Rescorer | NoDecoder,
        language_model: NgramScorer | None = None,
    ) -> None:
        """`config` is what a stream without options gets; others share its further settings."""
        self._language_model = language_model
        self._rescorer = rescorer
        self._config = config
        self._device = device
        self._vocab_size = vocab_size
        self._spelling = HotwordSpelling(tokenizer, vocab_size)
        self._decoders: dict[DecoderKind, _Decoder] = {}
        self._kind_of: dict[StreamId, DecoderKind] = {}
        self._final_order = FinalOrder(rescorer, language_model)

    @property
    def num_streams(self) -> int:
        return len(self._kind_of)

    @property
    def kinds(self) -> list[DecoderKind]:
        """Those that any stream has asked for, as far as they are kept."""
        return list(self._decoders)

    def drop_idle_kinds(self) -> None:
        """Forgets the kinds that no open stream uses; the next stream of one makes it anew."""
        used = set(self._kind_of.values())
        self._decoders = {kind: made for kind, made in self._decoders.items() if kind in used}

    def check(self, options: StreamOptions) -> None:
        """Raises InvalidRequestError for what this model cannot spell or this server has not."""
        _check_search(options)
        if options.use_lm and self._language_model is None:
            raise InvalidRequestError(
                "use_lm: this server has no n-gram model; leave it out, or have lm_path set"
            )
        if options.rescoring and isinstance(self._rescorer, NoDecoder):
            raise InvalidRequestError(
                f"rescoring: {self._rescorer.reason}; leave rescoring out, or serve a checkpoint "
                "whose attention decoder can be used"
            )
        if options.phrases:
            self._spelling.graph(options)

    def allocate_stream(self, stream_id: StreamId, options: StreamOptions | None = None) -> None:
        """Raises StreamStateError for an id that is open, InvalidRequestError as `check` does."""
        if stream_id in self._kind_of:
            raise StreamStateError(f"stream {stream_id!r} is already allocated; free it first")
        if options is not None:
            self.check(options)
        kind = self._kind(options)
        decoder = self._decoder(kind)
        decoder.manager.allocate_stream(stream_id, batch=1, vocab_size=self._vocab_size)
        self._kind_of[stream_id] = kind
        if decoder.hotwords is not None and options is not None:
            (state,) = decoder.manager.get_states([stream_id])
            graph = self._spelling.graph(options)
            decoder.hotwords.assign(state.rows, self._spelling.key(options), graph)
        if options is not None:
            self._final_order.open(stream_id, options)

    def free_stream(self, stream_id: StreamId) -> None:
        decoder = self._find(stream_id)
        if decoder.hotwords is not None:
            (state,) = decoder.manager.get_states([stream_id])
            decoder.hotwords.release(state.rows)
        self._final_order.close(stream_id)
        decoder.manager.free_stream(stream_id)
        del self._kind_of[stream_id]

    def get_decoder(self, stream_id: StreamId) -> StreamHandle:
        return self._find(stream_id).manager.get_decoder(stream_id)

    def begin_decode(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], logits_BTV: Tensor
    ) -> Finish:
        """One step: row i of the (B, T, V) logits belongs to stream i.

        The logits have been read, as the device sees it, when this returns; hypotheses grow with
        the returned call.
        """
        begun = []
        by_kind = self._rows_by_kind(stream_ids)
        for kind, rows in by_kind.items():
            manager = self._decoders[kind].manager
            scores_NTV = logits_BTV
            if len(by_kind) > 1:
                row_N = to_device(np.array(rows, dtype=np.int64), logits_BTV.device)
                scores_NTV = logits_BTV.index_select(0, row_N)
            if kind.search == "prefix_beam":
                scores_NTV = scores_NTV.float().log_softmax(dim=-1)
            states = manager.get_states([stream_ids[row] for row in rows])
            frames = [num_frames[row] for row in rows]
            begun.append(manager.decoder.begin_chunk_batch(scores_NTV, states, num_frames=frames))

        def finish() -> None:
            for finish_kind in begun:
                finish_kind()

        return finish

    @property
    def weighs_ends(self) -> bool:
        """Whether `end` may change the order of any stream's hypotheses."""
        return self._final_order.is_awaited

    def keep_encoded(
        self, stream_ids: Sequence[StreamId], num_frames: Sequence[int], encoded_BTD: Tensor
    ) -> None:
        """Keeps a step's encoder frames for the streams that will be rescored, if there are any."""
        self._final_order.keep(stream_ids, num_frames, encoded_BTD)

    def end(
        self,
        stream_ids: Sequence[StreamId],
        *,
        meanwhile: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Streams that have ended get the last order of their hypotheses, once.

        `best`, `tails` and `nbest` follow it from then on. Within `meanwhile` no stream's state is
        read or written.
        """
        self._final_order.decide(
            stream_ids,
            lambda one: self.nbest(one, self._kind_of[one].beam_size),
            meanwhile=meanwhile,
        )

    def is_rescored(self, stream_id: StreamId) -> bool:
        return self._final_order.is_rescored(stream_id)

    def best(
        self, stream_ids: Sequence[StreamId], *, skips: Sequence[int] | None = None
    ) -> list[Hypothesis]:
        """Each stream's best hypothesis, without its first `skips` tokens; no device work."""
        skips = [0] * len(stream_ids) if skips is None else skips
        found = self._read(
            stream_ids, skips, lambda decoder, states, own: decoder.best_batch(states, skips=own)
        )
        for row, best in self._final_order.best(stream_ids):
            found[row] = best.without_first(skips[row])
        return found

    def tails(self, stream_ids: Sequence[StreamId], skips: Sequence[int]) -> list[Tail]:
        """What a transcript needs of each stream whose first `skips` tokens it has already."""
        found = self._read(
            stream_ids, skips, lambda decoder, states, own: decoder.tails(states, own)
        )
        for row, best in self._final_order.best(stream_ids):
            found[row] = Tail(best.tokens[skips[row] :], found[row].num_stable)
        return found

    def nbest(self, stream_id: StreamId, count: int, *, skip: int = 0) -> list[Hypothesis]:
        """The `count` best hypotheses of one stream, or as many as there are; best first.

        Without their first `skip` tokens, which no later chunk may change.
        """
        final = self._final_order.get(stream_id)
        if final is not None:
            return [hypothesis.without_first(skip) for hypothesis in final[:count]]
        handle = self.get_decoder(stream_id)
        return handle.decoder.nbest(handle.state, count, skip=skip)

    def num_stable(self, stream_id: StreamId) -> int:
        """How many first tokens of every hypothesis can no longer change."""
        handle = self.get_decoder(stream_id)
        return handle.decoder.num_stable(handle.state)

    def check_integrity(self) -> None:
        """Every stream is with exactly one decoder, and every decoder agrees with itself."""
        managers = [decoder.manager for decoder in self._decoders.values()]
        num_held = sum(manager.num_streams for manager in managers)
        assert num_held == len(self._kind_of), "a decoder keeps a stream that is gone"
        for stream_id in self._kind_of:
            self._find(stream_id).manager.get_states([stream_id])
        self._final_order.check_integrity(self._kind_of)
        for decoder in self._decoders.values():
            decoder.manager.check_integrity()
            if decoder.hotwords is not None:
                decoder.hotwords.check_integrity()

    def _kind(self, options: StreamOptions | None) -> DecoderKind:
        if options is not None:
            return DecoderKind.of(options)
        is_beam = self._config.decoder == "prefix_beam"
        return DecoderKind(self._config.decoder, self._config.beam_size if is_beam else 1)

    def _decoder(self, kind: DecoderKind) -> _Decoder:
        if kind not in self._decoders:
            config = replace(self._config, decoder=kind.search, beam_size=kind.beam_size, nbest=1)
            hotwords = self._spelling.scorer(self._device) if kind.has_hotwords else None
            language_model = self._language_model if kind.has_lm else None
            both: tuple[PrefixScorer | None, ...] = (hotwords, language_model)
            scorers = [scorer for scorer in both if scorer is not None]
            manager = CtcStateCacheManager(config, device=self._device, scorers=scorers)
            self._decoders[kind] = _Decoder(manager, hotwords)
        return self._decoders[kind]

    def _find(self, stream_id: StreamId) -> _Decoder:
        try:
            return self._decoders[self._kind_of[stream_id]]
        except KeyError:
            raise UnknownStreamError(
                f"stream {stream_id!r} has no decoder; allocate_stream() comes first"
            ) from None

    def _read(
        self,
        stream_ids: Sequence[StreamId],
        skips: Sequence[int],
        read: Callable[[GpuStreamingDecoder, list[StreamState], list[int]], list[ReadT]],
    ) -> list[ReadT]:
        """What `read` tells of each stream, asked once of every kind of decoder."""
        by_kind = self._rows_by_kind(stream_ids)
        if len(by_kind) == 1:
            (kind,) = by_kind
            manager = self._decoders[kind].manager
            return read(manager.decoder, manager.get_states(stream_ids), list(skips))
        found: dict[int, ReadT] = {}
        for kind, rows in by_kind.items():
            manager = self._decoders[kind].manager
            states = manager.get_states([stream_ids[row] for row in rows])
            told = read(manager.decoder, states, [skips[row] for row in rows])
            found.update(zip(rows, told, strict=True))
        return [found[row] for row in range(len(stream_ids))]

    def _rows_by_kind(self, stream_ids: Sequence[StreamId]) -> Mapping[DecoderKind, Sequence[int]]:
        if len(self._decoders) == 1:
            return dict.fromkeys(self._decoders, range(len(stream_ids)))
        rows: dict[DecoderKind, list[int]] = {}
        for row, stream_id in enumerate(stream_ids):
            try:
                rows.setdefault(self._kind_of[stream_id], []).append(row)
            except KeyError:
                self._find(stream_id)
        return rows


def _check_search(options: StreamOptions) -> None:
    if options.decoder not in ("", "greedy", "prefix_beam"):
        raise InvalidRequestError(
            f"decoder={shown(options.decoder)} is unknown; send one of greedy, prefix_beam"
        )
    most = options.beam_size if options.decoder == "prefix_beam" else 1
    if options.nbest > most:
        raise InvalidRequestError(
            f"nbest={options.nbest} is outside 1 .. {most}: greedy keeps one hypothesis, "
            "prefix_beam beam_size of them; lower nbest, or send decoder=prefix_beam and beam_size"
        )
    for name in ("hotwords", "use_lm", "rescoring"):
        if getattr(options, name) and options.decoder != "prefix_beam":
            raise InvalidRequestError(
                f"{name}={shown(getattr(options, name))} needs a search that weighs "
                f"alternatives; send decoder=prefix_beam too, or leave {name} out"
            )
