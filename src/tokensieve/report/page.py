"""The page around the sections, and the Jinja environment they share. Autoescape is on for every template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tokensieve._version import VERSION

if TYPE_CHECKING:
    from tokensieve.report.sections import Section

__all__ = ["build_page", "render"]


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("tokensieve.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> Markup:
    """A template filled in; values are escaped, the result is HTML."""
    return Markup(_environment().get_template(template).render(**values))


def build_page(title: str, sections: Sequence[Section], records: int) -> str:
    """The whole page. Sections with nothing to show are left out. records: how many it was made from."""
    parts = [(section, html) for section in sections if (html := section.html())]
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return render("page.html.j2", title=title, parts=parts, records=records, version=VERSION, date=date)
