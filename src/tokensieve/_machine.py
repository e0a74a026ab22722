"""What processor this is. A leaf: imports the standard library only."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

__all__ = ["cpu_family", "cpu_model", "cpu_vendor"]


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_vendor() -> str:
    """Whose processor it is, such as "AuthenticAMD"; "" where the system does not tell."""
    return _cpuinfo("vendor_id")


def cpu_family() -> int:
    """The vendor's number for its generation, such as 26 for Zen 5; 0 where the system does not tell."""
    found = _cpuinfo("cpu family")
    return int(found) if found.isdecimal() else 0


def _cpuinfo(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.partition(":")[0].strip() == name:
                return line.partition(":")[2].strip()
    return ""
