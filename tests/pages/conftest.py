"""One browser for the tests of pages, and one way to open a page in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class Opener(Protocol):
    def __call__(self, file: Path, width: int, scheme: str) -> AbstractContextManager[Any]: ...


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make setup)")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (make chromium)")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=_FLAGS.split())
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Opener:
    """The page of a file at a width and in a colour scheme; afterwards, nothing was said and nothing was asked for."""

    @contextmanager
    def opened(file: Path, width: int, scheme: str) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda asked: said.append(asked.url))
        page.goto(file.as_uri())
        yield page
        context.close()
        assert [line for line in said if not line.startswith(("file:", "data:"))] == []

    return opened


@pytest.fixture(params=[(1280, "light"), (360, "light"), (1280, "dark"), (360, "dark")], ids=str)
def opened(open_page: Opener, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module's `page_file` at both widths, light and dark."""
    width, scheme = request.param
    with open_page(page_file, width, scheme) as page:
        yield page
