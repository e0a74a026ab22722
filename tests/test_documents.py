"""What README and docs show works: Python is run, flags exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tokensieve.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
FENCE = re.compile(r"((?:<!--(?:(?!-->).)*-->\n)?)```(\w+)\n(.*?)^```$", re.M | re.S)
SETUP = re.compile(r"<!-- python: (.*?) ?-->", re.S)


def _blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(the comment before it, the code) of every fenced block of a language."""
    return [(note, code) for note, kind, code in FENCE.findall(page.read_text()) if kind == language]


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _shown(language: str) -> list[Path]:
    return [page for page in PAGES if _blocks(page, language)]


@pytest.mark.parametrize("page", _shown("python"), ids=_id)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "document"}
    for note, code in _blocks(page, "python"):
        if note.startswith("<!-- needs"):
            compile(code, str(page), "exec")
            continue
        setup = SETUP.search(note)
        if setup:
            exec(setup[1], names)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, str(page), "exec"), names)


@cache
def _help(*words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return said.getvalue()


def _commands(page: Path) -> list[list[str]]:
    lines = "".join(code.replace("\\\n", " ") for _, code in _blocks(page, "bash")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "tokensieve" in line]
    for line in words:  # python -m tokensieve.cli, torchrun ... -m tokensieve.cli
        if "tokensieve.cli" in line:
            line[: line.index("tokensieve.cli") + 1] = ["tokensieve"]
    return [line[1:] for line in words if line and line[0] == "tokensieve"]


@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)], ids=_id)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for line in _commands(page):
        if line and line[0].startswith("-"):
            continue
        assert line, page
        assert line[0] in COMMANDS, line
        parts = [line[0]]
        if line[0] in ("data", "extract", "new", "search", "train") or line[1:2] in (["reid"], ["vlm"]):
            parts = line[:2]
        known = _help(*parts)
        for word in line:
            flag = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][\w-]*|-[a-z]", flag):
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", known), (
                    f"{page.name}: {' '.join(line)}: {flag}"
                )


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere_and_lines_are_readable(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert not re.search(r"^ {4}(import|from|with|tokensieve) ", text, re.M), "code without a fence"
    if page.name.startswith("README"):
        assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 140
