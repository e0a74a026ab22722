"""What processor this is, from what Linux says; and where nobody says anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokensieve.utils import machine as _machine

INFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9755: of many cores
"""


def read(text: str | None, monkeypatch: pytest.MonkeyPatch) -> str:
    def tell(path: Path, **_: object) -> str:
        assert str(path) == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", tell)
    return _machine.cpu_model()


def test_linux_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(INFO, monkeypatch) == "AMD EPYC 9755: of many cores"


@pytest.mark.parametrize("text", [None, "", "processor: 0\ncpu family\t: unknown\n"])
def test_nobody_says_it(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine.platform, "processor", lambda: "")
    monkeypatch.setattr(_machine.platform, "machine", lambda: "riscv64")
    assert read(text, monkeypatch) == "riscv64"
