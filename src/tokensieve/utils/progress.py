"""Progress on the terminal, of every command that has any: bars that vanish at the end, and lines that stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Bars", "bars"]


class Bars:
    """What is going on, by name. Without a terminal, and in other processes than the first, no bar is drawn."""

    def __init__(self, progress: Any, totals: Mapping[str, int | None]) -> None:
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}

    def to(self, name: str, done: int, total: int | None = None) -> None:
        """total: where it was not known at first."""
        self._progress.update(self._tasks[name], completed=done, total=total)

    def further(self, name: str, more: int = 1, label: str | None = None) -> None:
        """label: shown instead of the name from now on."""
        self._progress.update(self._tasks[name], advance=more, description=label)

    def tell(self, line: str, file: TextIO | None = None) -> None:
        """A line that stays; at once, also where the output is a file that somebody follows.

        file: where it goes without a terminal (None: standard output).
        """
        if self._progress.console.is_terminal:
            self._progress.console.print(line, markup=False)
        else:
            print(line, file=file, flush=True)


@contextmanager
def bars(totals: Mapping[str, int | None]) -> Iterator[Bars]:
    """totals: name -> how much there is to do; None where that shows later."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from tokensieve.utils.processes import rank

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=rank() > 0 or not console.is_terminal) as progress:
        yield Bars(progress, totals)
