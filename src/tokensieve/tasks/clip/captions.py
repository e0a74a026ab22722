"""Captioning where beam search or a scorer is missing: captions by greedy choice, scores by the scorers that run here.

METEOR and the Penn Treebank tokenizer need Java, SPICE needs models that it would download: what is absent is left out
and named.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError, UnsupportedModelError, one_line

__all__ = ["captions", "evaluate", "greedy", "score"]

Captions = dict[int, list[dict[str, str]]]

START, END, PAD = 49406, 49407, 0  # of CLIP's vocabulary
_LENGTH = 30  # as CoCa's own generate
_SHORTEST = 5


def evaluate(model: nn.Module, dataloader: Iterable[Any], device: str, amp: bool) -> tuple[dict[str, float], list[str]]:
    """Metrics with clip_benchmark's names, and what was left out or replaced."""
    true: Captions = {}
    made: Captions = {}
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=amp):
        for images, references in dataloader:
            for caption, known in zip(captions(model, images.to(device)), references, strict=True):
                true[len(true)] = [{"caption": text} for text in known]
                made[len(made)] = [{"caption": caption}]
    metrics, left_out = score(true, made)
    return metrics, left_out if has_beam_search() else ["beam search (greedy captions)", *left_out]


def has_beam_search() -> bool:
    """Whether CoCa's own generate runs with the installed transformers."""
    return bool(importlib.import_module("open_clip.coca_model")._has_transformers)


def captions(model: nn.Module, images: Tensor) -> list[str]:
    """One caption for each image."""
    if not hasattr(model, "generate"):
        raise UnsupportedModelError(
            f"--task captioning needs a model that writes, such as CoCa, not {type(model).__name__}"
        )
    tokens = model.generate(images) if has_beam_search() else greedy(model, images)  # type: ignore[operator]
    tokenizer = importlib.import_module("open_clip.tokenizer")._tokenizer
    texts = [tokenizer.decode(row) for row in tokens.cpu().tolist()]
    return [text.split("<end_of_text>")[0].replace("<start_of_text>", "").strip() for text in texts]


def greedy(model: nn.Module, images: Tensor, length: int = _LENGTH, shortest: int = _SHORTEST) -> Tensor:
    """(B, T) tokens of the likeliest next word each time, T <= length; END not before `shortest` tokens."""
    latent, embeddings = model._encode_image(images)  # type: ignore[operator]
    tokens = torch.full((len(images), 1), START, device=images.device)
    ended = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    while tokens.shape[1] < length and not ended.all():
        out = model(images, tokens, image_latent=latent, image_embs=embeddings, output_labels=False)
        logits = out["logits"][:, -1].float()
        if tokens.shape[1] < shortest:
            logits[:, END] = -torch.inf
        following = logits.argmax(dim=-1).masked_fill(ended, PAD)
        ended |= following == END
        tokens = torch.cat([tokens, following.unsqueeze(1)], dim=1)
    return tokens


def score(true: Captions, made: Captions) -> tuple[dict[str, float], list[str]]:
    """BLEU, ROUGE-L and CIDEr always; METEOR and SPICE where they run."""
    try:
        package = importlib.import_module("pycocoevalcap")
        scorers = {name: _scorer(*where) for name, where in _SCORERS.items()}
    except ImportError as error:
        raise MissingMaterialError(f"--task captioning needs the package pycocoevalcap ({error})") from None
    java = shutil.which("java") is not None
    folder = Path(next(iter(package.__path__)))
    left_out = [] if java else ["METEOR (needs Java)", "Penn Treebank tokenizer (needs Java; plain words instead)"]
    if not java or not any(folder.glob("spice/lib/stanford-corenlp*models.jar")):
        left_out.append("SPICE (needs Java and models that it downloads)")
    with contextlib.redirect_stdout(io.StringIO()):  # the scorers print
        gts, res = _words(true, java), _words(made, java)
        metrics: dict[str, float] = {}
        for name, scorer in scorers.items():
            if any(entry.startswith(name) for entry in left_out):
                continue
            try:
                value, _ = scorer().compute_score(gts, res)
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                left_out.append(f"{name} ({one_line(error, 80)})")
                continue
            values = value if isinstance(value, list) else [value]
            names = [f"Bleu_{i + 1}" for i in range(4)] if name == "Bleu" else [name]
            metrics |= {key: float(number) for key, number in zip(names, values, strict=True)}
    return metrics, left_out


_SCORERS = {
    "Bleu": ("bleu.bleu", "Bleu"),
    "METEOR": ("meteor.meteor", "Meteor"),
    "ROUGE_L": ("rouge.rouge", "Rouge"),
    "CIDEr": ("cider.cider", "Cider"),
    "SPICE": ("spice.spice", "Spice"),
}


def _scorer(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"pycocoevalcap.{module}"), name)


def _words(texts: Captions, java: bool) -> dict[int, list[str]]:
    if java:
        found: dict[int, list[str]] = _scorer("tokenizer.ptbtokenizer", "PTBTokenizer")().tokenize(texts)
        return found
    return {key: [" ".join(re.findall(r"\w+", one["caption"].lower())) for one in all_] for key, all_ in texts.items()}
