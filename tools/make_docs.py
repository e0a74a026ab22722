"""Write the generated pages: one for each method, and the command line.

python tools/make_docs.py            write docs/methods/ and docs/cli.md
python tools/make_docs.py --check    exit code 1 where one of them is not what it would be
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from pathlib import Path

os.environ["COLUMNS"] = "100"  # argparse wraps help at the terminal's width

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTE = "<!-- written by tools/make_docs.py -->\n"
WHERE = {
    "encoder": "inside a vision encoder",
    "projector": "between vision tower and language model (stage 1)",
    "decoder": "inside a language model (stage 2)",
}


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    from tokensieve.cli.main import COMMANDS
    from tokensieve.methods.registry import list_methods, method_class, method_options, method_paper, method_stages

    found: dict[Path, str] = {}
    rows = []
    for name, line in list_methods().items():
        cls, paper = method_class(name), method_paper(name)
        stages = ", ".join(WHERE[stage] for stage in method_stages(name))
        link = f"[{paper}](https://arxiv.org/abs/{paper})" if paper else "-"
        rows.append(f"| [{name}]({name}.md) | {line} | {link} |")
        options = "\n".join(f"| `{option}` | `{default!r}` |" for option, default in method_options(name).items())
        about = inspect.getdoc(cls) or ""
        found[DOCS / "methods" / f"{name}.md"] = (
            f"{NOTE}# {name}\n\n{line[0].upper()}{line[1:]}. Works {stages}.\n\n"
            + (f"Paper: {link}.\n\n" if paper else "")
            + f"```text\n{about}\n```\n\n## Options\n\n| option | default |\n|---|---|\n{options}\n\n"
            f"File: `src/tokensieve/{inspect.getsourcefile(cls).split('tokensieve/', 1)[1].split('tokensieve/')[-1]}`\n"
        )
    table = "\n".join(rows)
    listed = "\n".join(list_methods())
    found[DOCS / "methods" / "index.md"] = (
        f"{NOTE}# Methods\n\nAll run under the same budget, model, data and clock. Each page is made from the "
        f"method's class.\n\n"
        f"| method | what it does | paper |\n|---|---|---|\n{table}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )
    parts = []
    for command in COMMANDS:
        for words in _subcommands(command):
            parts.append(f"## tokensieve {' '.join(words)}\n\n```text\n{_help(words)}\n```\n")
    found[DOCS / "cli.md"] = f"{NOTE}# Command line\n\n" + "\n".join(parts)
    return found


def _subcommands(command: str) -> list[list[str]]:
    known = {
        "data": ["cifar10", "reid-synthetic", "reid-check", "vqa-synthetic"],
        "eval": ["reid", "vlm"],
        "extract": ["clip", "reid"],
        "new": ["method"],
        "search": ["clip", "vlm", "reid"],
        "train": ["align", "reid", "select", "vlm", "vlm-base"],
    }
    return [[command], *([command, word] for word in known.get(command, ()))]


def _help(words: list[str]) -> str:
    from tokensieve.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def stale() -> list[str]:
    """Names of pages that differ from what they would be, and of pages that nothing writes any more."""
    wanted = pages()
    old = [path.name for path in (DOCS / "methods").glob("*.md") if path not in wanted]
    return old + [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    if "--check" in sys.argv:
        found = stale()
        print("\n".join(f"{name}: run python tools/make_docs.py" for name in found))
        return 1 if found else 0
    (DOCS / "methods").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
