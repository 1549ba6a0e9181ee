"""`oasr-client`: recordings or the microphone to text.

Exit status: 0 all went well, 1 a source failed, 2 the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oasr_client.audio import raw_format
from oasr_client.batch import Batch, transcribe_files, transcribe_microphone
from oasr_client.effects import check_effects, check_request_options
from oasr_client.errors import ClientError
from oasr_client.interrupt import quit_on_interrupt
from oasr_client.manifest import Reference, load_manifest
from oasr_client.options import parse_options
from oasr_client.output import OutputError, standard_output, tell
from oasr_client.recording import Recording
from oasr_client.report import JsonReport, LiveReport, Report
from oasr_client.retry import RetryPolicy
from oasr_client.settings import ClientSettings
from oasr_client.signals import SIGNALLED, until_signalled
from oasr_client.sources import AudioSource
from oasr_client.streaming import AsyncStreamingClient
from oasr_client.transcribe import Pace
from oasr_client.words import check_scoring, word_errors

app = typer.Typer(add_completion=False)


class Protocol(str, Enum):
    GRPC = "grpc"
    HTTP = "http"


class WireType(str, Enum):
    PCM16 = "pcm16"
    FP32 = "fp32"


class Form(str, Enum):
    TXT = "txt"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


class RawEncoding(str, Enum):
    PCM16 = "pcm16"
    MULAW = "mulaw"
    ALAW = "alaw"


@dataclass(frozen=True)
class Plan:
    """One run, checked."""

    settings: dict[str, Any]
    batch: Batch
    references: list[Reference]
    report: Report
    use_microphone: bool


@app.command()
def transcribe(  # noqa: PLR0913 - a command's options are its parameters
    context: typer.Context,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Audio files, 4 to 384 kHz.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="host:port; default 127.0.0.1 and the protocol's port.")
    ] = None,
    protocol: Annotated[Protocol, typer.Option(help="Transport.")] = Protocol.GRPC,
    model: Annotated[str, typer.Option(help="The model's name.")] = "oasr_streaming",
    chunk_ms: Annotated[float, typer.Option(min=0.0625, help="Audio per request.")] = 640.0,
    realtime: Annotated[bool, typer.Option("--realtime", help="Pace as a speaker does.")] = False,
    parallel: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 1,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object per answer; --format json adds its RESULT."),
    ] = False,
    no_partials: Annotated[bool, typer.Option("--no-partials", help="Finals only.")] = False,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Request parameter.")
    ] = None,
    dtype: Annotated[WireType, typer.Option(help="Sample type sent.")] = WireType.PCM16,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one request.")] = 30.0,
    manifest: Annotated[
        Path | None,
        typer.Option(help="JSON list or lines of {audio, text, offset, duration}: prints the WER."),
    ] = None,
    form: Annotated[
        Form,
        typer.Option("--format", help="Form of each file's final; srt and vtt ask for word_times."),
    ] = Form.TXT,
    output_dir: Annotated[
        Path | None, typer.Option(help="Write NAME.txt, .json, .srt or .vtt here.")
    ] = None,
    raw: Annotated[RawEncoding | None, typer.Option(help="Files without a header.")] = None,
    raw_rate: Annotated[int, typer.Option(help="Hz of --raw files, 4000 to 384000.")] = 8000,
    microphone: Annotated[
        bool, typer.Option("--microphone", help="Until Ctrl-C; needs sounddevice.")
    ] = False,
) -> None:
    """Transcribe audio files, or the microphone, with a streaming model on Triton.

    A terminal shows partials live. Otherwise each file's final text is one line, with
    "FILE: " before it when there are several.
    """
    _check_effects(context)
    references = _manifest(manifest)
    sources = _sources(files, references, use_microphone=microphone)
    _check_outputs(sources, form=form.value, output_dir=output_dir)
    settings = {
        "url": url,
        "protocol": protocol.value,
        "model_name": model,
        "dtype": dtype.value,
        "timeout_s": timeout,
        "options": _options(option, form),
        "want_result": form is not Form.TXT,
        # The whole recording is at hand, so the client sends a lost stream again from its start.
        "retry": RetryPolicy(replay_limit_s=30.0 if microphone else math.inf),
    }
    _check_settings(settings)
    batch = Batch(sources, _opener(raw, raw_rate), _pace(chunk_ms, realtime), parallel)
    try:
        report = _report(
            form.value,
            as_json=as_json,
            partials=not no_partials,
            output_dir=output_dir,
            with_names=len(sources) > 1,
        )
        status = _run(Plan(settings, batch, references, report, use_microphone=microphone))
    except OutputError as error:
        tell(str(error))
        status = 1
    raise typer.Exit(status)


def _run(plan: Plan) -> int:
    with plan.report:
        status = asyncio.run(until_signalled(_run_async(plan)))
        # The event loop has removed its own handler, and Ctrl-C needs one until the end.
        quit_on_interrupt()
    if status > SIGNALLED:
        tell("cancelled")
    return status


async def _run_async(plan: Plan) -> int:
    async with AsyncStreamingClient(**plan.settings) as client:
        if plan.use_microphone:
            text = await transcribe_microphone(client, plan.batch.pace, plan.report)
            return int(text is None)
        texts = await transcribe_files(client, plan.batch, plan.report)
    if plan.references:
        errors = word_errors(plan.references, texts)
        if errors.num_files:
            plan.report.scored(errors)
    return int(len(texts) < len(set(plan.batch.sources)))


def _report(
    form: str, *, as_json: bool, partials: bool, output_dir: Path | None, with_names: bool
) -> Report:
    out = standard_output()
    if as_json:
        return JsonReport(out, partials=partials, with_result=form == "json")
    if output_dir is not None:
        _make_directory(output_dir)
    if partials and out.isatty():
        return LiveReport(Console(), form=form, output_dir=output_dir, with_names=with_names)
    return Report(out, form=form, output_dir=output_dir, with_names=with_names)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"--output-dir: {path} cannot be made ({error.strerror}); name a folder"
        ) from error


def _pace(chunk_ms: float, is_realtime: bool) -> Pace:
    try:
        return Pace(chunk_ms, is_realtime)
    except ClientError as error:
        raise typer.BadParameter(f"--chunk-ms: {error}") from error


def _opener(raw: RawEncoding | None, rate_hz: int) -> Callable[[AudioSource], Recording]:
    if raw is None:
        return Recording
    try:
        form = raw_format(raw.value, rate_hz)
    except ClientError as error:
        raise typer.BadParameter(f"--raw-rate: {error}") from error
    return lambda source: Recording(source, form)


def _check_effects(context: typer.Context) -> None:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    names = {str(option.name): option.opts[0] for option in context.command.params}
    try:
        check_effects(given, context.params, names)
    except ClientError as error:
        raise typer.BadParameter(str(error)) from error


def _manifest(path: Path | None) -> list[Reference]:
    if path is None:
        return []
    try:
        # Scoring comes last, so that a missing package does not cost a whole run.
        check_scoring()
        return load_manifest(path)
    except ClientError as error:
        raise typer.BadParameter(str(error)) from error


def _sources(
    files: list[Path] | None, references: list[Reference], *, use_microphone: bool
) -> list[AudioSource]:
    named: list[AudioSource] = [*(files or ())]
    listed = dict.fromkeys(reference.audio for reference in references)
    sources = [*named, *(path for path in listed if path not in named)]
    if use_microphone == bool(sources):
        raise typer.BadParameter("give audio files or --manifest, or else --microphone alone")
    return sources


def _check_outputs(sources: list[AudioSource], *, form: str, output_dir: Path | None) -> None:
    if form in ("srt", "vtt") and len(sources) > 1 and output_dir is None:
        raise typer.BadParameter(f"several files with --format {form} need --output-dir")
    stems = [source.stem for source in sources]
    if output_dir is not None and len(set(stems)) < len(stems):
        raise typer.BadParameter("two files have one name and would share a file in --output-dir")


def _options(pairs: list[str] | None, form: Form) -> dict[str, Any]:
    implied = {"word_times": True} if form in (Form.SRT, Form.VTT) else {}
    try:
        options = {**implied, **parse_options(pairs or ())}
        check_request_options(options, form=form.value)
        return options
    except ClientError as error:
        raise typer.BadParameter(str(error)) from error


def _check_settings(settings: dict[str, Any]) -> None:
    try:
        ClientSettings(**settings)
    except ClientError as error:
        raise typer.BadParameter(str(error)) from error
