"""The documentation as a site: `make docs` writes build/site and treats a warning as an error."""

from __future__ import annotations

import re
from typing import Any

import tokensieve

project = "tokensieve"
author = "The tokensieve authors"
release = version = tokensieve.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = "tokensieve"
html_static_path: list[str] = []
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]

_OUT = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([\w./-]+)\)")


def _links_out(app: Any, docname: str, source: list[str]) -> None:
    """A link to a file outside of docs/, which is not a page, becomes its text and the file's name in code."""
    source[0] = _OUT.sub(r"\1 (`\2`)", source[0])


def _as_written(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text with `name: meaning` lines, so they are shown as they stand."""
    if any(lines):
        lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("source-read", _links_out)
