"""Quiet around downloads: a model that cannot be had is one error of ours, not twenty warnings of its library."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["quiet_hub"]


def _news(record: logging.LogRecord) -> bool:
    """Whether a record is more than open_clip's word on the error that it raises next."""
    return not record.getMessage().startswith("Failed to download")


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """In here nothing is told of each attempt to reach a host; bars of downloads are shown."""
    hub, root = logging.getLogger("huggingface_hub"), logging.getLogger()
    level = hub.level
    hub.setLevel(logging.ERROR)
    root.addFilter(_news)
    try:
        yield
    finally:
        hub.setLevel(level)
        root.removeFilter(_news)
