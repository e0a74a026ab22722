"""Results in the playground: the report's page of a folder, and ranked lists of a re-identification model.

Imports report; torch only inside `reid_queries`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import MissingMaterialError
from tokensieve.report import build_page
from tokensieve.report.results import read_evals
from tokensieve.tasks.reid.section import Reid
from tokensieve.tasks.sections import eval_sections

__all__ = ["framed", "query_names", "query_page", "reid_queries", "report_of"]

_LISTS = 24


def report_of(folder: Path) -> str:
    """The page that `tokensieve report` writes of a folder's results, without pictures of photos."""
    if not folder.is_dir():
        raise MissingMaterialError(f"--runs {folder}: there is no such folder")
    runs = read_evals([folder])
    return build_page(f"Results in {folder.name}", eval_sections(runs), len(runs))


def framed(page: str, height: int = 900) -> str:
    """A page inside a page, in a frame that may run its own script and reach nothing else."""
    return (
        f'<iframe class="ts-page" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" '
        f'title="results" srcdoc="{html.escape(page, quote=True)}"></iframe>'
    )


def reid_queries(checkpoint: Path, data: Path | None) -> Mapping[str, Any]:
    """A result of `tokensieve eval reid` with ranked lists of up to 24 queries, from the worst to the best."""
    from tokensieve.tasks.reid.runs import EvalOptions, evaluate_checkpoints

    options = EvalOptions(data=None if data is None else str(data), lists=_LISTS)
    return evaluate_checkpoints([checkpoint], options, command="tokensieve ui")


def query_names(result: Mapping[str, Any]) -> list[str]:
    """What the queries are called in the list to choose from."""
    lists: Sequence[Mapping[str, Any]] = result["lists"]
    return [f"{i + 1}. {found['query'].get('name', '')}" for i, found in enumerate(lists)]


def query_page(result: Mapping[str, Any], name: str) -> str:
    """The report's section with this query alone: top matches, and the patches selected of each modality."""
    number = query_names(result).index(name)
    chosen = {**result, "lists": [result["lists"][number]]}
    page = build_page("Re-identification", [Reid([chosen])], 1)
    return framed(page, 760)
