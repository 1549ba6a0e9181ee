"""The command line of `oasr-serve`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from oasr_backend.errors import OasrError, ServerError
from oasr_backend.serve.checks import Problem, find_problems
from oasr_backend.serve.command import (
    ServerSettings,
    build_command,
    build_environment,
    format_command,
)
from oasr_backend.serve.embedded import TritonInstall, find_triton
from oasr_backend.serve.overrides import collect_overrides
from oasr_backend.serve.process import TritonServer
from oasr_backend.serve.repository import default_model_repository
from oasr_backend.serve.shm import remove_orphaned_regions

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
        Path | None, typer.Option(help="Folder of the checkpoint to serve.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; default: as config.pbtxt says.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one parameter; repeatable."),
    ] = None,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    wait_ready: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.0, help="Print a line when ready; fail after SECONDS."
        ),
    ] = None,
    skip_check: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Ignore one check; repeatable.")
    ] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check, then stop.")] = False,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the server's command, then stop.")
    ] = False,
) -> None:
    """Serve streaming speech recognition with NVIDIA Triton.

    Exit status: 2 when a check found a problem or the command line is wrong, 1 when the server
    cannot be started or is not ready in time, otherwise that of tritonserver.
    """
    try:
        settings = ServerSettings(
            model_repository=model_repository or default_model_repository(),
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            overrides=collect_overrides(set_ or (), checkpoint=checkpoint, device=device),
            extra_flags=tuple(extra_flags or ()),
        )
        install = find_triton()
        _exit_on_problems(install, settings, set(skip_check or ()))
        if check_only:
            _stdout.print(f"all checks passed; the server is {install.binary}")
        elif print_command:
            environment = build_environment(install, settings)
            typer.echo(format_command(build_command(install, settings), environment))
        elif wait_ready is None:
            _become_server(install, settings)
        else:
            raise typer.Exit(_watch_over_server(install, settings, wait_ready))
    except OasrError as error:
        _stderr.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(EXIT_PROBLEMS if isinstance(error, ValueError) else EXIT_FAILED) from error


def _exit_on_problems(install: TritonInstall, settings: ServerSettings, skipped: set[str]) -> None:
    problems = [item for item in find_problems(install, settings) if item.name not in skipped]
    for problem in problems:
        _show(problem)
    if problems:
        raise typer.Exit(EXIT_PROBLEMS)


def _show(problem: Problem) -> None:
    message, remedy = escape(problem.message), escape(problem.remedy)
    _stderr.print(f"[red]{problem.name}:[/] {message}; [bold]{remedy}[/]")


def _become_server(install: TritonInstall, settings: ServerSettings) -> NoReturn:
    remove_orphaned_regions()
    command = build_command(install, settings)
    # The process stays the same one, so signals and the exit status need no go-between.
    os.execve(install.binary, command, build_environment(install, settings))


def _watch_over_server(install: TritonInstall, settings: ServerSettings, timeout_s: float) -> int:
    """Returns the exit status for the shell."""
    server = TritonServer(settings, install=install, inherit_output=True)
    requests_to_stop = _pass_signals_to(server)
    try:
        server.start()
        server.wait_ready(timeout_s)
        _stdout.print(f"ready: http {server.http_url}, grpc {server.grpc_url}")
        status = server.wait()
    except ServerError:
        # A server that is told to stop while it loads is no failure.
        if not requests_to_stop:
            raise
        status = server.wait()
    finally:
        server.stop()
    return status if status >= 0 else 128 - status


def _pass_signals_to(server: TritonServer) -> list[int]:
    """Returns the list to which every signal that arrives is appended."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if not server.is_started:
            raise SystemExit(128 + number)
        # A terminal that closes ends a server as a request to stop does.
        server.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    return received
