"""The composition root: a checkpoint and the settings become an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from oasr_backend.cache import CacheConfig
from oasr_backend.cache.kv_store import KvStore
from oasr_backend.cache.state import SlotStates
from oasr_backend.checkpoints import Checkpoint, open_checkpoint
from oasr_backend.compiled import compiled_encoder, lacks_graph
from oasr_backend.config import DecodingSettings, ServingConfig
from oasr_backend.decoders.base import SearchSettings
from oasr_backend.decoders.bias.language_model import load_language_model
from oasr_backend.decoders.bias.ngram import NgramScorer
from oasr_backend.decoders.group import DecoderGroup
from oasr_backend.decoders.second_pass.base import NoDecoder, SecondPass
from oasr_backend.decoders.second_pass.encoded_frames import EncodedFrames
from oasr_backend.decoders.second_pass.rescorer import Rescorer
from oasr_backend.device import on_device
from oasr_backend.errors import ConfigError
from oasr_backend.features import AudioBuffer, WindowGeometry
from oasr_backend.metrics import EngineMetrics
from oasr_backend.models.acoustic_model import AcousticModel
from oasr_backend.models.base import EncoderSpec, StreamingEncoder
from oasr_backend.streaming.admission import Admission
from oasr_backend.streaming.engine import Engine
from oasr_backend.streaming.fit import (
    check_defaults,
    check_encoder,
    check_states,
    chunks_of,
    heed_blank,
)
from oasr_backend.streaming.kv_plan import plan_kv
from oasr_backend.streaming.parts import EngineParts
from oasr_backend.streaming.results import ResultBuilder
from oasr_backend.streaming.runner import EncoderRunner
from oasr_backend.streaming.self_test import SelfTest
from oasr_backend.streaming.store import StreamPart, StreamStore
from oasr_backend.streaming.streams import StreamRegistry
from oasr_backend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: What makes a runner of a model, its store and the shape of a step's windows.
MakeRunner = Callable[..., Any]


def load_engine(
    checkpoint_dir: str | Path,
    config: ServingConfig,
    *,
    device: str,
    on_stage: Callable[[str], None] = lambda _: None,
    may_export: bool = True,
) -> Engine:
    """Loads a checkpoint and gets ready to serve it on `device`.

    `on_stage` is told the name of each stage when it has ended: check, read, build, self_test.
    Without `may_export` a CPU's encoder runs in PyTorch where none of its graphs is kept.

    Raises ConfigError: what cannot be loaded, or cannot decode a short utterance, is not ready.
    """
    if config.search.lm_path:
        path = Path(checkpoint_dir)
        folder = path.parent if path.is_file() else path
        config = config.changed(lm_path=str(folder / config.search.lm_path))
    where = torch.device(device)
    with on_device(where):
        opened = open_checkpoint(checkpoint_dir)
        # What needs no weights comes before the time that they take.
        settings = config.with_defaults(on_gpu=where.type == "cuda")
        spec = opened.info.encoder.under(chunks_of(settings))
        check_encoder(spec)
        _kv_plan(spec, settings, where)
        check_states(spec.state_specs, settings, where)
        check_defaults(opened.info, config)
        language_model = None
        if opened.info.tokenizer is not None:
            language_model = _language_model(config.search, opened.info.tokenizer, where)
        on_stage("check")
        checkpoint = opened.load()
        on_stage("read")
        engine = assemble(
            checkpoint,
            config,
            device=where,
            language_model=language_model,
            may_export=may_export,
        )
        on_stage("build")
        try_out(engine)
        on_stage("self_test")
    return engine


def awaits_graph(engine: Engine) -> bool:
    """Whether its encoder runs in PyTorch only until a graph of it is made and kept."""
    model, settings = engine.parts.model, engine.config.model
    is_on_cpu = engine.store.device.type == "cpu" and settings.dtype == "float32"
    return is_on_cpu and lacks_graph(model.encoder, settings.cpu_encoder)


def take_kept_graph(engine: Engine) -> bool:
    """Serves by the graph that is kept by now; whether there is one. Steps go on beside it.

    The changeover takes place while no step goes on; streams keep all that they have.
    """
    model = engine.parts.model
    encoder = _cpu_encoder(model, engine.config, may_export=False)
    if encoder is model.encoder:
        return False
    with engine.at_rest():
        model.encoder = encoder
    return True


def assemble(  # noqa: PLR0913 - all but three have a default
    checkpoint: Checkpoint,
    config: ServingConfig,
    *,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
    make_runner: MakeRunner = EncoderRunner,
    further: Sequence[StreamPart] = (),
    language_model: NgramScorer | None = None,
    may_export: bool = True,
) -> Engine:
    """Moves the checkpoint's weights to `device` and builds everything around them.

    `further` parts are kept of every stream beside those of the encoder and the decoders; their
    slots are below `max_streams`. `language_model` None: that of `lm_path` is read, if one is set.

    Raises ConfigError for settings that do not fit the model, the device or each other.
    """
    config = config.with_defaults(on_gpu=device.type == "cuda")
    checkpoint.model.set_chunks(chunks_of(config))
    heed_blank(checkpoint.model, config.search)
    check_encoder(checkpoint.model.spec)
    # Before tables are made for so much history.
    check_states(checkpoint.model.state_specs, config, device)
    if language_model is None:
        language_model = _language_model(config.search, checkpoint.tokenizer, device)
    model, kv = _placed(checkpoint.model, config, device, may_export=may_export)
    geometry = model.window_geometry()
    store = StreamStore(
        kv,
        SlotStates(
            model.state_specs,
            config.step.max_streams,
            device,
            dtype=getattr(torch, config.model.dtype),
            extra_slots=1,
        ),
        _decoders(
            checkpoint,
            config,
            device,
            geometry=geometry,
            language_model=language_model,
        ),
        chunk_frames=model.spec.chunk_frames,
        window_frames=geometry.window_frames,
        further=further,
    )
    streams = StreamRegistry(
        max_streams=config.step.max_streams,
        idle_timeout_s=config.server.stream_idle_timeout_s,
        store=store,
        new_buffer=lambda: AudioBuffer(geometry),
    )
    metrics = EngineMetrics()
    runner = make_runner(
        model,
        store,
        window_shape=(config.step.max_step_streams, geometry.window_samples),
        num_lanes=config.step.steps_at_once,
    )
    if config.step.cuda_graphs:
        runner.capture()
    parts = EngineParts(
        config=config,
        model=model,
        geometry=geometry,
        store=store,
        streams=streams,
        admission=Admission(streams, store.decoders, config, metrics),
        runner=runner,
        results=ResultBuilder(
            checkpoint.tokenizer, store.decoders, frame_s=geometry.encoder_frame_s
        ),
        metrics=metrics,
    )
    return Engine(parts, clock=clock)


def try_out(engine: Engine) -> None:
    """One short utterance, which leaves nothing behind. Raises SelfTestError."""
    with engine.at_rest():
        SelfTest(engine.parts).run()


def _kv_plan(spec: EncoderSpec, config: ServingConfig, device: torch.device) -> CacheConfig | None:
    """None for an encoder without attention. Raises ConfigError for a pool that does not fit."""
    return plan_kv(config, spec, device=device, dtype=getattr(torch, config.model.dtype))


def _placed(
    model: AcousticModel, config: ServingConfig, device: torch.device, *, may_export: bool
) -> tuple[AcousticModel, KvStore | None]:
    """The model on its device, with tables for every position that its history can have."""
    plan = _kv_plan(model.spec, config, device)
    num_positions = config.cache.position_limit_frames
    kv = None
    if plan is not None:
        num_positions = max(num_positions, plan.max_stream_frames)
        kv = KvStore(plan, pad_lanes=1)
    model.prepare(
        device=device,
        dtype=getattr(torch, config.model.dtype),
        num_positions=num_positions + model.spec.chunk_frames,
    )
    if device.type == "cpu":
        model.encoder = _cpu_encoder(model, config, may_export=may_export)
    return model, kv


def _cpu_encoder(
    model: AcousticModel, config: ServingConfig, *, may_export: bool
) -> StreamingEncoder:
    """What runs the encoder; graphs are made in float32. Raises ConfigError."""
    choice, dtype = config.model.cpu_encoder, config.model.dtype
    if dtype != "float32" and choice != "pytorch":
        if choice != "auto":
            raise ConfigError(
                f"cpu_encoder={choice} runs in float32, and dtype={dtype}; leave dtype out, or set "
                "cpu_encoder=auto or pytorch"
            )
        logger.info("event=encoder_eager reason=dtype=%s, and graphs run in float32", dtype)
        return model.encoder
    geometry = model.window_geometry()
    return compiled_encoder(
        model.encoder,
        choice=choice,
        chunk_frames=model.spec.chunk_frames,
        window_frames=geometry.window_frames,
        num_features=geometry.frames.num_bins,
        may_export=may_export or choice != "auto",
    )


def _decoders(
    checkpoint: Checkpoint,
    config: ServingConfig,
    device: torch.device,
    *,
    geometry: WindowGeometry,
    language_model: NgramScorer | None,
) -> DecoderGroup:
    tokenizer = checkpoint.tokenizer
    return DecoderGroup(
        checkpoint.searches,
        SearchSettings(
            device=device,
            blank_id=checkpoint.blank_id,
            blank_threshold=config.search.blank_threshold,
        ),
        tokenizer,
        vocab_size=tokenizer.vocab_size,
        second_pass=_second_pass(checkpoint, config, device, geometry),
        language_model=language_model,
    )


def _language_model(
    settings: DecodingSettings, tokenizer: Tokenizer, device: torch.device
) -> NgramScorer | None:
    """Raises ConfigError for an n-gram model that does not fit."""
    if not settings.lm_path:
        return None
    return load_language_model(
        settings.lm_path,
        tokenizer,
        weight=settings.lm_weight,
        unit_bonus=settings.lm_unit_bonus,
        device=device,
    )


def _second_pass(
    checkpoint: Checkpoint, config: ServingConfig, device: torch.device, geometry: WindowGeometry
) -> SecondPass:
    """Moves the attention decoder to the device, where the checkpoint has one."""
    decoder = checkpoint.second_pass
    if isinstance(decoder, NoDecoder):
        return decoder
    dtype = getattr(torch, config.model.dtype)
    decoder.prepare(device=device, dtype=dtype)
    frames = EncodedFrames(
        block_frames=checkpoint.model.spec.chunk_frames,
        model_dim=decoder.model_dim,
        max_frames=round(config.search.rescoring_max_s / geometry.encoder_frame_s),
        device=device,
        dtype=dtype,
    )
    return Rescorer(decoder, frames, ctc_weight=config.search.rescoring_ctc_weight)
