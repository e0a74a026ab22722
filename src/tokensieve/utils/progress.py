"""Progress of a training on the terminal: bars that vanish at the end, and lines that stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Bars", "bars"]


class Bars:
    """What is going on, by name. Without a terminal, and in other processes than the first, no bar is drawn."""

    def __init__(self, progress: Any, totals: Mapping[str, int]) -> None:
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}

    def to(self, name: str, done: int) -> None:
        self._progress.update(self._tasks[name], completed=done)

    def further(self, name: str, more: int) -> None:
        self._progress.update(self._tasks[name], advance=more)

    def tell(self, line: str) -> None:
        """A line that stays; at once, also where the output is a file that somebody follows."""
        if self._progress.console.is_terminal:
            self._progress.console.print(line)
        else:
            print(line, flush=True)


@contextmanager
def bars(totals: Mapping[str, int]) -> Iterator[Bars]:
    """totals: name -> how much there is to do."""
    from rich.console import Console
    from rich.progress import Progress

    from tokensieve.utils.processes import rank

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=rank() > 0 or not console.is_terminal) as progress:
        yield Bars(progress, totals)
