"""What is supported, as text: the list, one model, and docs/models.md. Imports registry and errors only."""

from __future__ import annotations

from tokensieve.errors import UnknownNameError, nearest
from tokensieve.models.families.base import Family
from tokensieve.models.families.registry import families

__all__ = ["REFUSED", "describe", "listed", "markdown"]

REFUSED = {
    "swin": "attention within windows, which need whole rectangles of patches",
    "hiera": "attention within windows, and stages that pool whole rectangles of patches",
    "maxvit": "attention within windows and on a grid, which need whole rectangles of patches",
    "sam": "attention within windows, which need whole rectangles of patches",
    "vitdet": "attention within windows, which need whole rectangles of patches",
    "convnext": "convolutions: there is no sequence of tokens",
    "resnet": "convolutions: there is no sequence of tokens",
    "efficientnet": "convolutions: there is no sequence of tokens",
    "pvt": "stages that pool whole rectangles of patches",
    "segformer": "stages that pool whole rectangles of patches",
    "x-clip": "blocks that pass a message between frames; they differ from what their parts suggest",
    "eomt": "queries that enter the sequence in the last blocks",
    "yolos": "detection tokens behind the patches",
}


def listed() -> str:
    """One line a family: its name and classes."""
    wide = max(len(_bare(f)) for f in families()) + 2
    return "\n".join(f"{_bare(f):<{wide}}{', '.join(f.examples)}" for f in families())


def describe(name: str) -> str:
    """Whether and how a class works, by its own name or with its library's in front."""
    key = name.lower().rsplit(".", 1)[-1]
    for family in families():
        if any(example.lower().rsplit(".", 1)[-1] == key for example in family.examples):
            return _how(name, family)
    for word, why in REFUSED.items():
        if word.replace("-", "") in key.replace("-", "").replace("_", ""):
            return f"{name}: not supported, {why}"
    known = [example.rsplit(".", 1)[-1] for family in families() for example in family.examples]
    raise UnknownNameError(
        f"no family names the class {name!r}; attach recognises models by their parts, so it may work still."
        f"{nearest(name, known)}"
    )


def _how(name: str, family: Family) -> str:
    parts = ", ".join(part for part in (*family.needs, family.blocks_at) if part)
    form = family.forms[-1]
    lines = [
        f"{name}: supported, as {family.name}",
        f"recognised by: {parts}",
        f"a block is: {_chain(*form.before, form.attn or 'attention', *form.after)}; then {_chain(*form.mlp)}",
        f"mask: {'reduced with the tokens' if any(f.mask for f in family.forms) else 'refused'}",
        f"rotary positions: {'gathered for each image' if any(f.rotate for f in family.forms) else 'none'}",
        f"position bias: {'gathered for each image' if any(f.bias for f in family.forms) else 'none'}",
        "verified at attach: each kind of block against its own forward, on random tokens",
    ]
    return "\n".join(lines)


def _chain(*parts: str) -> str:
    return " -> ".join(parts)


def markdown() -> str:
    """docs/models.md."""
    rows = [f"| {_bare(f)} | {', '.join(f'`{e}`' for e in f.examples)} | {_notes(f)} |" for f in families()]
    refused = [f"| {name} | {why} |" for name, why in REFUSED.items()]
    return "\n".join([*_HEAD, *rows, *_MIDDLE, *refused, *_TAIL])


def _bare(family: Family) -> str:
    return family.name.removeprefix("an ").removeprefix("a ")


def _notes(family: Family) -> str:
    notes = [
        "mask" if any(f.mask for f in family.forms) else "",
        "rotary" if any(f.rotate for f in family.forms) else "",
        "position bias" if any(f.bias for f in family.forms) else "",
        "parallel blocks" if any(f.parallel for f in family.forms) else "",
    ]
    return ", ".join(filter(None, notes)) or "-"


_HEAD = """# Models

<!-- written by `tokensieve models --markdown` -->

`attach` finds the vision encoder in a model by the names of its parts and checks each kind of block: its own forward
and our form of it run on a few random tokens, and a block that differs is refused by name. On the meta device there is
nothing to check, and a warning says so.

| family | classes | handled |
|---|---|---|""".splitlines()

_MIDDLE = """
Masks, rotary tables and position biases are gathered for each image by what it keeps. An extra token (evit with
`fuse=True`) has no place in a rotary tower and is refused there. What a method reads of a block's attention leaves a
position bias out (BEiT, relpos): the model's own attention has it, the scores have not.

In a padded batch each image is cut to its own budget (a ratio is of its own patches), so that its result does not
depend on its batch mates; `kept` is -1 where a shorter image is filled up.

## Not supported

| model | why |
|---|---|""".splitlines()

_TAIL = """
## Your own model

Describe it: where the blocks are, what they consist of, how many tokens come before the patches, and the grid.

```python
import tokensieve
from tokensieve.models.encoder.form import BlockForm
from tokensieve.models.families.base import Family


class MyFamily(Family):
    name = "my ViT"
    needs = ("stem", "class_token")
    blocks_at = "layers"
    forms = (BlockForm(before=("norm_a",), attn="mixer", qkv=("to_qkv",), heads="heads", out=("to_out",),
                       after=("scale_a",), mlp=("norm_b", "feed", "scale_b")),)

    def prefix(self, tower):
        return 1

    def grid(self, tower):
        return tower.grid

tokensieve.register_family(MyFamily)
```

A package registers its families with the entry point group `tokensieve.families`. A description that does not fit is
refused when it is attached.
""".splitlines()
