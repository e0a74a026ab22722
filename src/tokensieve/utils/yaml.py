"""YAML that people write, read safely. Imports PyYAML inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokensieve.errors import MissingMaterialError, OptionError, one_line
from tokensieve.utils.files import read_text

__all__ = ["read_config", "safe_yaml"]


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys and values in the file that --config names; of an empty file none. All commands read it here."""
    try:
        text = read_text(path)
    except OSError as error:
        raise MissingMaterialError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--config {path} is not a text file") from None
    data = safe_yaml(text, f"--config {path}")
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise OptionError(f"--config {path}: expected keys with values, found a {type(data).__name__}")
    return data


def safe_yaml(text: str, where: str) -> Any:
    """What the text says, plain data only. where: begins the error of invalid YAML, which says the line."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        what = " ".join(filter(None, (error.context, error.problem)))
        raise OptionError(f"{where} is not valid YAML{place}: {what}") from None
    except (ValueError, AttributeError, RecursionError) as error:  # a date that is none, and the like
        raise OptionError(f"{where} is not valid YAML: {one_line(error)}") from None
    except yaml.reader.ReaderError as error:
        raise OptionError(f"{where} is not valid YAML, character {error.position + 1}: {error.reason}") from None
