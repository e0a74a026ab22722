"""One HTML page from run records. Opens offline: style, script, plots and pictures are inside it. No torch."""

from tokensieve.results.report.page import build_page
from tokensieve.results.report.sections import Photo, Pictures, Section, eval_sections

__all__ = ["Photo", "Pictures", "Section", "build_page", "eval_sections"]
