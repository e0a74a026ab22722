"""The playground through a real browser: upload, slider, compare, errors, and 200 requests in a row."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="gradio is not installed (make setup)")

from helpers.playgrounds import photo, playground
from tokensieve.tasks.playground.app import Pages, build_app, launch

pytestmark = pytest.mark.slow


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("samples")
    samples = []
    for i in range(2):
        samples.append(folder / f"sample-{i}.png")
        photo(i).save(samples[-1])
    app, port = build_app(Pages(playground(), samples)), _free_port()
    launch(app, "127.0.0.1", port, quiet=True, block=False)
    yield f"http://127.0.0.1:{port}"
    app.close()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=str)
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = context.new_page()
    outside: list[str] = []
    found.on("request", lambda asked: outside.append(asked.url) if not _local(asked.url) else None)
    found.goto(address)
    found.wait_for_selector("#ts-photo")
    yield found
    assert outside == []
    assert found.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def _local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1", "data:", "blob:"))


def _upload(page: Any, path: Path) -> None:
    page.set_input_files("#ts-photo input[type=file]", str(path))


def test_upload_slider_and_compare(page: Any, tmp_path: Path) -> None:
    photo(5).save(tmp_path / "mine.png")
    _upload(page, tmp_path / "mine.png")
    page.wait_for_selector("#ts-one-kept img")
    page.wait_for_selector("#ts-other-facts svg")
    assert "14 of 36" in page.inner_text("#ts-one-facts")
    assert "tome" in page.inner_text("#ts-other-facts")
    page.focus("#ts-keep input[type=range]")
    page.keyboard.press("Home")
    page.wait_for_function("document.querySelector('#ts-one-facts').innerText.includes('2 of 36')")
    page.wait_for_function("document.querySelector('#ts-other-facts').innerText.includes('keep')")  # tome cannot
    assert page.query_selector("#ts-other-facts .ts-problem")


def test_what_is_not_a_photo_gets_a_friendly_line(page: Any, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("this is not a photo")
    _upload(page, tmp_path / "text.jpg")
    page.wait_for_selector(".toast-wrap, [data-testid=toast-body]")
    said = page.inner_text(".toast-wrap, [data-testid=toast-body]")
    assert "text.jpg cannot be read" in said
    assert "Traceback" not in said
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    page.reload()
    page.wait_for_selector("#ts-photo")
    _upload(page, tmp_path / "bomb.png")
    page.wait_for_selector(".toast-wrap, [data-testid=toast-body]")
    assert "too large" in page.inner_text(".toast-wrap, [data-testid=toast-body]")


def test_two_hundred_requests_leave_memory_flat(address: str, tmp_path: Path) -> None:
    from gradio_client import Client, handle_file

    photo(1).save(tmp_path / "mine.png")
    client = Client(address, verbose=False)
    file, used = handle_file(str(tmp_path / "mine.png")), []
    for number in range(200):
        client.predict(file, 40, "sieve", "(none)", "", "torch", "", api_name="/look")
        if number in (60, 199):
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert used[1] - used[0] < 40e6
