"""What processor this is. A leaf: imports the standard library only."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

__all__ = ["cpu_model"]


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.partition(":")[0].strip() == name:
                return line.partition(":")[2].strip()
    return ""
