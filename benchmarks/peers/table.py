"""The comparison as a few tables that a person reads; the report's JSON has every figure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.report import Figure


def show(figures: Sequence[Figure], console: Console) -> None:
    """One table for each subject: the name of a figure is `subject: column, row`.

    Medians, with the least and the greatest value behind where there are more than one.
    """
    subjects: dict[str, list[Figure]] = {}
    for figure in figures:
        subjects.setdefault(figure.name.partition(": ")[0], []).append(figure)
    for subject, members in subjects.items():
        console.print(_table(subject, members))


def _table(subject: str, figures: Sequence[Figure]) -> Table:
    cells: dict[tuple[str, str], str] = {}
    for figure in figures:
        column, _, row = figure.name.partition(": ")[2].partition(", ")
        cells[f"{row or 'throughput'}, {figure.unit}", column] = _cell(figure)
    columns = list(dict.fromkeys(column for _, column in cells))
    table = Table(title=subject, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in dict.fromkeys(row for row, _ in cells):
        table.add_row(row, *(cells.get((row, column), "") for column in columns))
    return table


def _cell(figure: Figure) -> str:
    spread = f" ({min(figure.values):.3g}-{max(figure.values):.3g})"
    return f"{figure.median:.3g}" + (spread if len(figure.values) > 1 else "")
