"""Quiet around downloads: a model that cannot be had is one error of ours, not twenty warnings of its library."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["quiet_hub", "quiet_transformers"]


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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and its reports on weights while a model is read."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
