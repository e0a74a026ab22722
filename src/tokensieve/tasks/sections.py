"""Which sections a page of results has: each task brings its own. Imports report and the tasks' sections; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.report.runs import Run
from tokensieve.report.sections import Commands, Plots, Section, Summary, Table
from tokensieve.search.section import Searches
from tokensieve.tasks.reid.section import Reid
from tokensieve.tasks.vlm.section import Vlm, with_baselines

__all__ = ["eval_sections"]


def eval_sections(runs: Sequence[Run], pictures: Section | None = None, studies: Sequence[Run] = ()) -> list[Section]:
    """The sections for results of `tokensieve eval`, and for records of searches."""
    every = with_baselines(runs)
    sections: list[Section | None] = [
        Summary(every) if every else None, Plots(every), Searches(studies), pictures, Reid(runs), Vlm(runs),
        Table(every), Commands([*runs, *studies]),
    ]  # fmt: skip
    return [section for section in sections if section is not None]
