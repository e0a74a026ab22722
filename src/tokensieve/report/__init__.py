"""One HTML page from run records. Opens offline: style, script, plots and pictures are inside it. No torch."""

from tokensieve.report.page import build_page, render
from tokensieve.report.sections import Photo, Pictures, Section

__all__ = ["Photo", "Pictures", "Section", "build_page", "render"]
