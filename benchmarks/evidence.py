"""What the evidence scripts beside this file share: runs in processes, and tables in Markdown for a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

END = "<!-- end of tables -->"


def run_all(function: Callable[..., str], jobs: Sequence[tuple[Any, ...]], processes: int) -> None:
    """Call the function with each job's arguments, that many at a time, each process fresh; print what it returns.

    A job that ends in an error is named, the others go on; then the program ends with code 2.
    """
    from tokensieve.errors import TokensieveError

    failed = 0
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(function, *job) for job in jobs]):
            try:
                print(done.result(), flush=True)
            except TokensieveError as error:
                failed += 1
                print(f"failed: {' '.join(str(error).split())[:400]}", flush=True)
    if failed:
        print(f"{failed} of {len(jobs)} runs failed: correct what is named, and start the same command again")
        raise SystemExit(2)


def spread(values: list[float]) -> str:
    """Mean and sample deviation, in per cent."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put_into_page(text: str, page: Path, begin: str, title: str) -> None:
    """Replace what stands between the mark `begin` and the next end mark. A page without the mark gets it at its end,
    a page that does not exist is made.
    """
    from tokensieve.records import write_whole

    old = page.read_text(encoding="utf-8") if page.is_file() else f"# {title}\n"
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{END}\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(END)[2]
    write_whole(page, f"{before}{begin}\n\n{text}\n\n{END}{after}".encode())
