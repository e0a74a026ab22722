"""Tables in Markdown, put between two marks of a page. What the evidence scripts beside this file share."""

from __future__ import annotations

from pathlib import Path

END = "<!-- end of tables -->"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put_into_page(text: str, page: Path, begin: str, title: str) -> None:
    """Replace what stands between the mark `begin` and the next end mark. A page without the mark gets it at its end,
    a page that does not exist is made.
    """
    from tokensieve.results.record import write_whole

    old = page.read_text(encoding="utf-8") if page.is_file() else f"# {title}\n"
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{END}\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(END)[2]
    write_whole(page, f"{before}{begin}\n\n{text}\n\n{END}{after}".encode())
