"""Write a method of your own, and its test, to start from.

The file has one class that works; `tokensieve check FILE.py` runs the contract on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cli.parts import run_part

EPILOG = """examples:
  tokensieve new method largest_norm
  tokensieve check largest_norm.py"""

PARTS = {"method": "new_method"}


def main(argv: Sequence[str]) -> int:
    return run_part("new", argv, PARTS, __doc__, EPILOG)
