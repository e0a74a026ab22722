"""Run the contract on the methods in a Python file: a table with a line for each rule.

Checked are exact budgets, prefix tokens, order, batches that equal their singles, half precision, sizes, seeds, and a
model of the method's stage, attached and restored. Exit code 1 where a rule is broken.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

EPILOG = """examples:
  tokensieve check largest_norm.py
  tokensieve check largest_norm.py:LargestNorm power=3
  tokensieve check mypackage.methods:LargestNorm --models openclip timm"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("method", metavar="METHOD", help="FILE.py (every method in it), FILE.py:Class, package.module:Class, or a name")
    add("options", nargs="*", metavar="KEY=VALUE", help="options of the method")
    add("--models", nargs="+", metavar="NAME", help="tiny models to attach it to (default: the one of its stage)")


def run(args: Namespace) -> int:
    from tokensieve.cli.parts import show
    from tokensieve.tasks.arguments import option_pairs
    from tokensieve.testing.check import check_all, check_table

    results = check_all(args.method, args.models, option_pairs(args.options))
    show(check_table(results))
    broken = [result for result in results if result.fault]
    for result in broken:
        print(f"{result.method}: {result.fault}")
    print(f"{len(results) - len(broken)} rules kept, {len(broken)} broken")
    return 1 if broken else 0
