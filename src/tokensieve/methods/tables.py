"""The built-in methods as Markdown tables, made from the table of facts: README's. Imports no torch."""

from __future__ import annotations

from tokensieve.methods.built_in import BUILT_IN, Facts

__all__ = ["BEGIN", "END", "markdown_tables"]

BEGIN, END = "<!-- methods -->", "<!-- end methods -->"  # what stands around them in a page
_PAPERS, _FILES = "https://arxiv.org/abs/", "src/tokensieve/methods/"


def markdown_tables() -> str:
    """Three tables: methods of encoders, of vision-language models only, and learned ones. Links to file and paper."""
    learned = {name for name, facts in BUILT_IN.items() if facts.module.startswith("trained.")}
    encoders = {name for name, facts in BUILT_IN.items() if "encoder" in facts.stages} - learned
    rest = BUILT_IN.keys() - encoders - learned
    parts = [
        _table("In a vision encoder, and before or inside a language model unless said", encoders),
        _table("In a vision-language model", rest),
        _table("Learned", learned),
    ]
    return "\n\n".join(parts)


def _table(head: str, names: set[str]) -> str:
    lines = [f"| {head} | | paper |", "|---|---|---|"]
    for name, facts in BUILT_IN.items():
        if name in names:
            paper = f"[{facts.paper}]({_PAPERS}{facts.paper})" if facts.paper else ""
            lines.append(f"| [`{name}`]({_FILES}{facts.module.replace('.', '/')}.py) | {_line(facts)} | {paper} |")
    return "\n".join(lines)


def _line(facts: Facts) -> str:
    return facts.summary + (" (encoder only)" if facts.stages == ("encoder",) else "")
