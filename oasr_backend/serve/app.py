"""The command line of `oasr-serve`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from oasr_backend.errors import OasrError
from oasr_backend.serve.checks import CHECK_NAMES, Problem, find_problems
from oasr_backend.serve.command import (
    ServerSettings,
    build_command,
    build_environment,
    format_command,
)
from oasr_backend.serve.cores import parse_instance_cores
from oasr_backend.serve.embedded import TritonInstall, find_triton
from oasr_backend.serve.instances import choose_instances
from oasr_backend.serve.overrides import CHECKPOINT_KEY, collect_overrides, known_keys
from oasr_backend.serve.process import TritonServer
from oasr_backend.serve.repository import (
    default_model_repository,
    model_names,
    read_models,
)
from oasr_backend.serve.shm import remove_orphaned_regions, unowned_region_prefix
from oasr_backend.serve.stubs import LEAST_HANG_LIMIT_S
from oasr_backend.serve.trial import loaded_models, try_loads
from oasr_backend.serve.watch import watch_over
from oasr_backend.triton_backend.startup import settle_memory

EXIT_PROBLEMS = 2
EXIT_FAILED = 1

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_stdout = Console(soft_wrap=True, highlight=False)
_stderr = Console(stderr=True, soft_wrap=True, highlight=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def serve(  # noqa: PLR0913 - one parameter is one command-line option
    extra_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- TRITON FLAGS]", help="Passed to tritonserver as they are."),
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Default: that of the checkout, else ./model_repository."),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL:]DIR",
            help="Folder of the checkpoint to serve, by all models or by one; repeatable.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: as config.pbtxt says.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[MODEL:]KEY=VALUE",
            help="Override one parameter, of all models that know it or of one; repeatable.",
        ),
    ] = None,
    instances: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[MODEL:]N",
            help="Instances of all our models or of one; repeatable. Default: as config.pbtxt "
            "says; on a CPU, where it says 1, one for every 8 cores.",
        ),
    ] = None,
    instance_cores: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Cores for the model's instances alone, best one for each: they keep up with "
            "more streams.",
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    wait_ready: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.0, help="Fail when not ready after SECONDS."),
    ] = None,
    hang_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=LEAST_HANG_LIMIT_S,
            help="Stop the server when a model has stood still for SECONDS; inf: never.",
        ),
    ] = 60.0,
    skip_check: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Ignore one check; repeatable.")
    ] = None,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check, load each model once, then stop.")
    ] = False,
    exec_: Annotated[
        bool,
        typer.Option(
            "--exec",
            help="Become the tritonserver, instead of staying beside it to name the cause of a "
            "failure, to stop it with a model that died or hangs, and to take it along.",
        ),
    ] = False,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the server's command, then stop.")
    ] = False,
) -> None:
    """Serve streaming speech recognition with NVIDIA Triton until a signal comes.

    oasr-serve starts tritonserver and stays beside it; with --exec it becomes tritonserver.

    Exit status: 0 after SIGINT, SIGTERM or SIGHUP, 2 when a check found a problem or the command
    line is wrong, 1 when the server cannot be started, is not ready in time or has a model that
    died or hangs, otherwise that of tritonserver.
    """
    try:
        repository = model_repository or default_model_repository()
        names = model_names(repository)
        settings = ServerSettings(
            model_repository=repository,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            overrides=collect_overrides(
                set_ or (), checkpoints=checkpoint or (), device=device, models=names
            ),
            extra_flags=tuple(extra_flags or ()),
            instance_cores=None if instance_cores is None else parse_instance_cores(instance_cores),
        )
        settings = replace(settings, instances=choose_instances(instances or (), settings))
        install = find_triton()
        skipped = _known_checks(skip_check or ())
        _exit_on_problems(find_problems(install, settings), skipped)
        _tell_shared_checkpoint(settings)
        if check_only:
            said = ["all checks passed"]
            if "load" not in skipped:
                loads = try_loads(install, settings)
                for warning in loads.warnings:
                    _stderr.print(escape(f"note: {warning}"))
                _exit_on_problems(loads.problems, skipped)
                said += [f"loaded {model}" for model in loaded_models(settings)]
            _stdout.print(escape("; ".join([*said, f"the server is {install.binary}"])))
        elif print_command:
            typer.echo(_command_line(install, settings))
        elif exec_:
            _tell_instances(settings)
            _become_server(install, settings)
        else:
            _tell_instances(settings)
            ready_timeout_s = math.inf if wait_ready is None else wait_ready
            server = TritonServer(settings, install=install, inherit_output=True)
            raise typer.Exit(_run_server(server, ready_timeout_s, hang_limit))
    except OasrError as error:
        _stderr.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(EXIT_PROBLEMS if isinstance(error, ValueError) else EXIT_FAILED) from error


def _tell_shared_checkpoint(settings: ServerSettings) -> None:
    """One checkpoint for several models is rarely what is meant."""
    configs = read_models(settings.model_repository)
    names = [config.name for config in configs if CHECKPOINT_KEY in known_keys(config)]
    if len(names) > 1 and CHECKPOINT_KEY in settings.overrides:
        _stderr.print(
            escape(
                f"note: this checkpoint counts for {len(names)} models ({', '.join(names)}); "
                "--checkpoint MODEL:DIR gives each its own"
            )
        )


def _tell_instances(settings: ServerSettings) -> None:
    """A number that config.pbtxt does not show."""
    for config in read_models(settings.model_repository):
        if config.name in settings.instances:
            _stderr.print(
                escape(
                    f"note: {config.name} has {settings.instances[config.name]} instances, where "
                    f"its config.pbtxt says {config.instance_count}; --instances sets the number"
                )
            )


def _known_checks(names: Iterable[str]) -> set[str]:
    unknown = sorted(set(names) - set(CHECK_NAMES))
    if unknown:
        raise typer.BadParameter(
            f"--skip-check: there is no check {unknown[0]!r}; name one of {', '.join(CHECK_NAMES)}"
        )
    return set(names)


def _exit_on_problems(problems: Sequence[Problem], skipped: set[str]) -> None:
    problems = [item for item in problems if item.name not in skipped]
    for problem in problems:
        _show(problem)
    if problems:
        raise typer.Exit(EXIT_PROBLEMS)


def _show(problem: Problem) -> None:
    remedy = f"; [bold]{escape(problem.remedy)}[/]" if problem.remedy else ""
    _stderr.print(f"[red]{problem.name}:[/] {escape(problem.message)}{remedy}")


def _command_line(install: TritonInstall, settings: ServerSettings) -> str:
    """For a shell: this process, which would own the regions, is gone when the line is pasted."""
    settings = replace(settings, shm_prefix=unowned_region_prefix())
    return format_command(build_command(install, settings), build_environment(install, settings))


def _become_server(install: TritonInstall, settings: ServerSettings) -> NoReturn:
    remove_orphaned_regions()
    command = build_command(install, settings)
    # The process stays the same one, so signals and the exit status need no go-between.
    os.execvpe(command[0], command, build_environment(install, settings))


def _run_server(server: TritonServer, ready_timeout_s: float, hang_limit_s: float) -> int:
    """Returns the exit status for the shell."""
    line = f"ready: http {server.http_url}, grpc {server.grpc_url}"

    def on_ready() -> None:
        _stdout.print(line)
        # From here on it only looks at its server, once a second.
        settle_memory()

    status = watch_over(
        server, ready_timeout_s=ready_timeout_s, hang_limit_s=hang_limit_s, on_ready=on_ready
    )
    if status:
        _stderr.print(f"[red]error:[/] tritonserver has ended unasked, with status {status}")
    return status
