"""Writes transcripts: as plain lines, documents, JSON lines, or a live terminal view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn
from rich.text import Text

from oasr_client.audio import seconds
from oasr_client.errors import ClientError
from oasr_client.output import (
    json_line,
    output_told,
    standard_output,
    tell,
    without_faults,
    without_line_breaks,
)
from oasr_client.session import StreamUpdate
from oasr_client.sources import AudioSource, Excerpt
from oasr_client.subtitles import srt, vtt
from oasr_client.words import WordErrors

LONG_RECORDING_S = 20.0


@dataclass(frozen=True)
class Heard:
    """An answer that covers `num_samples` of a source, a live one if it is no file.

    `total_samples` is what is known beforehand of the source's length.
    """

    source: AudioSource | str
    update: StreamUpdate
    num_samples: int
    total_samples: int | None

    @property
    def name(self) -> str:
        return str(self.source)

    @property
    def stem(self) -> str:
        return self.source.stem if isinstance(self.source, Excerpt) else Path(self.source).stem


class Report:
    """Final documents only, on `out` or as files in `output_dir`.

    `form` is txt, json, srt or vtt; `with_names` puts the source's name before a line of text.
    """

    def __init__(
        self, out: TextIO, *, form: str, output_dir: Path | None, with_names: bool
    ) -> None:
        self._out = without_faults(out, is_document=form != "txt")
        self._form = form
        self._output_dir = output_dir
        self._with_names = with_names

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Each write is followed by a flush."""

    def heard(self, event: Heard) -> None:
        if event.update.is_final:
            self._finish(event)

    def failed(
        self, source: AudioSource | str, error: ClientError, heard: Heard | None = None
    ) -> None:
        """`heard` is the last answer, if one came; its text is no final one."""
        where = "" if str(error).startswith(str(source)) else f"{source}: "
        tell(f"{where}{error}")
        if heard is not None and heard.update.text and not heard.update.is_final:
            tell(f"{source}: heard until then: {heard.update.text}")

    def warned(self, source: AudioSource | str, words: str) -> None:
        tell(f"{source}: {words}")

    def scored(self, errors: WordErrors) -> None:
        self._write(
            f"WER {errors.rate:.2%} ({errors.num_errors} errors in {errors.num_words} words, "
            f"{errors.num_files} files)\n"
        )

    def _finish(self, event: Heard) -> None:
        document = render(event, self._form)
        if self._output_dir is not None:
            target = self._output_dir / f"{event.stem}.{self._form}"
            _write_file(target, document)
        elif self._with_names and self._form == "txt":
            self._write(f"{without_line_breaks(event.name)}: {document}")
        else:
            self._write(document)

    def _write(self, text: str) -> None:
        with output_told():
            self._out.write(text)
            self._out.flush()


class JsonReport(Report):
    """One object per answer and line; `partials` False leaves the finals."""

    def __init__(self, out: TextIO, *, partials: bool, with_result: bool) -> None:
        super().__init__(out, form="json", output_dir=None, with_names=False)
        self._partials = partials
        self._with_result = with_result

    def heard(self, event: Heard) -> None:
        if not (self._partials or event.update.is_final):
            return
        line = {
            **_identity(event.source),
            "text": event.update.text,
            "is_final": event.update.is_final,
            "audio_s": round(seconds(event.num_samples), 4),
            "latency_ms": round(event.update.latency_s * 1000, 3),
        }
        if self._with_result:
            line["result"] = event.update.result
        self._line(line)

    def failed(
        self, source: AudioSource | str, error: ClientError, heard: Heard | None = None
    ) -> None:
        super().failed(source, error)
        line = {**_identity(source), "error": str(error), "kind": type(error).__name__}
        if heard is not None:
            line["partial_text"] = heard.update.text
        self._line(line)

    def scored(self, errors: WordErrors) -> None:
        self._line(
            {
                "wer": round(errors.rate, 6),
                "errors": errors.num_errors,
                "words": errors.num_words,
                "files": errors.num_files,
            }
        )

    def _line(self, fields: dict[str, Any]) -> None:
        self._write(json_line(fields))


class LiveReport(Report):
    """A terminal: one moving line per running source, the finals above them."""

    def __init__(
        self, console: Console, *, form: str, output_dir: Path | None, with_names: bool
    ) -> None:
        super().__init__(standard_output(), form=form, output_dir=output_dir, with_names=with_names)
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", style="cyan", markup=False),
            _LongBar(bar_width=20),
            TextColumn("{task.fields[tail]}", markup=False),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def heard(self, event: Heard) -> None:
        if event.name not in self._tasks:
            name = without_line_breaks(Path(event.name).name)
            self._tasks[event.name] = self._progress.add_task(
                name, total=event.total_samples, tail=""
            )
        task = self._tasks[event.name]
        tail = event.update.text[-self._tail_width(event) :]
        self._progress.update(task, completed=event.num_samples, tail=tail)
        if event.update.is_final:
            self._close(event.name)
        super().heard(event)

    def failed(
        self, source: AudioSource | str, error: ClientError, heard: Heard | None = None
    ) -> None:
        self._close(str(source))
        super().failed(source, error, heard)

    def _close(self, name: str) -> None:
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))

    def _tail_width(self, event: Heard) -> int:
        return max(10, self._console.width - len(Path(event.name).name) - 26)

    def _write(self, text: str) -> None:
        with output_told():
            self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


class _LongBar(BarColumn):
    """Recordings of at least this length get a bar."""

    def render(self, task: Task) -> Any:
        is_long = task.total is not None and seconds(int(task.total)) >= LONG_RECORDING_S
        return super().render(task) if is_long else Text("")


def _identity(source: AudioSource | str) -> dict[str, Any]:
    if not isinstance(source, Excerpt):
        return {"file": str(source)}
    return {"file": str(source.path), "offset": source.offset_s, "duration": source.duration_s}


def _write_file(target: Path, document: str) -> None:
    try:
        target.write_text(document, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ClientError(
            f"{target}: not writable ({error.strerror}); name another --output-dir"
        ) from error


def render(event: Heard, form: str) -> str:
    """The final document of one source, ending in a newline."""
    update = event.update
    result = {"text": update.text, **(update.result or {})}
    result.setdefault("audio_s", seconds(event.num_samples))
    forms: dict[str, Callable[[], str]] = {
        "txt": lambda: update.text + "\n",
        "json": lambda: json_line({**_identity(event.source), **result}),
        "srt": lambda: srt(result),
        "vtt": lambda: vtt(result),
    }
    return forms[form]()
