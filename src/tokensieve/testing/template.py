"""What `tokensieve new method` writes: a method that works, and its test."""

from __future__ import annotations

import keyword
from pathlib import Path

from tokensieve.errors import OptionError
from tokensieve.records import check_writable, write_whole

__all__ = ["write_method"]

METHOD = '''"""{title}: what it keeps, and why. Name the paper and its arXiv id where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import tokensieve


@dataclass(kw_only=True)
class {cls}(tokensieve.Selector):
    """Keep the patches whose residual stream has the largest norm.

    power: fields are options, set by attach(model, ..., power=3) or by power=3 on the command line.
    """

    power: float = 1.0

    def score(self, view: tokensieve.TokenView, keep: int) -> Tensor:
        """(B, N), the `keep` highest stay. The view has x, keys, importance(), cls_attention(), attention_to(), ..."""
        return view.x.norm(dim=-1) ** self.power
'''

TEST = '''"""{cls} keeps the contract, and does what it says."""

from __future__ import annotations

import pytest
import torch
from {name} import {cls}

import tokensieve
from tokensieve.testing import contract_cases


@pytest.mark.parametrize("rule", contract_cases({cls}))
def test_contract(rule):
    rule()


def test_against_a_naive_loop():
    torch.manual_seed(0)
    tokens = torch.randn(2, 1 + 9, 8)
    kept = {cls}().reduce(tokensieve.TokenView.of(tokens), 4).keep
    for image in range(2):
        norms = [float(patch.norm()) for patch in tokens[image, 1:]]
        best = sorted(range(9), key=lambda i: norms[i], reverse=True)[:4]
        assert kept[image].tolist() == sorted(best)
'''


def write_method(name: str, folder: Path) -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py into a folder; the two paths. Files that exist are an error."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("test_"):
        raise OptionError(f"name {name!r}: give a lower-case Python name such as largest_norm")
    words = name.split("_")
    cls = "".join(word.capitalize() for word in words)
    texts = {folder / f"{name}.py": METHOD, folder / f"test_{name}.py": TEST}
    for path in texts:
        if path.exists():
            raise OptionError(f"{path} exists already: choose another name, or remove it")
        check_writable(path)
    for path, text in texts.items():
        whole = text.format(name=name, cls=cls, title=" ".join(words).capitalize())
        write_whole(path, whole.encode())
    method, test = texts
    return method, test
