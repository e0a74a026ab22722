"""What a method keeps of a photo, and what that does: the playground's first page. Imports no Gradio."""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from tokensieve.errors import OptionError
from tokensieve.report.pictures import draw_kept, draw_photo, draw_scores
from tokensieve.tasks.viewer import Request, Viewer

__all__ = ["ENGINES", "Look", "Playground", "load_playground"]

ENGINES = ("torch", "onnxruntime", "openvino")
CLASSES = ("dog", "cat", "bird", "car", "ship", "person", "flower", "food", "building", "chair")
_TEMPLATE = "a photo of a {}"
_MOST_CLASSES, _MOST_LETTERS = 50, 60
_REMEMBERED = 8  # engines and texts; features of photos are not kept


@dataclass(frozen=True)
class Look:
    """One method on one photo.

    tokens, tokens_full: leaving each block. predictions: (class, probability untouched, probability reduced), best
    first by the untouched model; empty without class names. cosine: of the image feature to the untouched one.
    """

    label: str
    kept: Image.Image
    scores: Image.Image | None
    count: str
    tokens: list[int]
    tokens_full: list[int]
    gmacs: float
    gmacs_full: float
    milliseconds: float
    milliseconds_full: float
    engine: str
    cosine: float
    predictions: list[tuple[str, float, float]] = field(default_factory=list)


class Playground:
    """One model, shared by all who look: calls take turns, and nothing of a photo outlives its call."""

    def __init__(
        self, viewer: Viewer, encode_text: Callable[[Sequence[str]], Tensor] | None = None, scale: float = 100.0
    ) -> None:
        """encode_text: prompts -> unit features (T, E) in the image feature's space; None: no predictions. scale: of
        the logits."""
        self.viewer, self.can_predict, self.scale = viewer, encode_text is not None, scale
        self._encode_text = encode_text
        self._lock = threading.Lock()
        self._texts: OrderedDict[tuple[str, ...], Tensor] = OrderedDict()
        self._engines: OrderedDict[str, Any] = OrderedDict()

    def look(self, photo: Image.Image, request: Request, classes: Sequence[str] = (), engine: str = "torch") -> Look:
        """The method at work on this photo, beside the untouched model. Times are of the second of two calls."""
        if engine not in ENGINES:
            raise OptionError(f"engine {engine!r}: one of {', '.join(ENGINES)}")
        images = self.viewer.preprocess(photo).unsqueeze(0)
        shown = self.viewer.shown(photo)
        with self._lock, torch.inference_mode():
            encode = getattr(self.viewer.model, "encode_image", self.viewer.model)
            full, full_ms = _timed(encode, images)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="nothing is reduced")  # the picture shows it
                handle = request.attach(self.viewer.model)
            with handle:
                reduced, ms = _timed(encode, images)
                kept, scores, cost = handle.kept, handle.scores, handle.cost()
                grid, patches = handle.grid, handle.patches
                tokens = list(handle.tokens_per_layer)
                full_tokens = [handle.prefix + patches] * handle.depth
                if engine != "torch":
                    ms = self._engine_time(f"{engine} {request.label} {request.at}", engine, images)
            if engine != "torch":
                full_ms = self._engine_time(f"{engine} untouched", engine, images)
            names, text = self._classes(classes)
        last = max(kept) if kept else None
        mask = np.ones(patches, dtype=np.bool_)
        if last is not None:
            mask[:] = False
            mask[kept[last][0].numpy()] = True
        heat = None
        if scores:
            first = min(scores)  # there every patch has one
            heat = draw_scores(shown, scores[first][0].double().numpy().reshape(grid))
        full, reduced = (F.normalize(feature.float(), dim=-1) for feature in (full, reduced))
        return Look(
            label=request.label, kept=draw_kept(shown, mask.reshape(grid)), scores=heat,
            count=f"{int(mask.sum())} of {patches}", tokens=tokens, tokens_full=full_tokens,
            gmacs=cost.macs / 1e9, gmacs_full=cost.macs_full / 1e9, milliseconds=ms, milliseconds_full=full_ms,
            engine=engine, cosine=float((full * reduced).sum()),
            predictions=_predictions(names, text, full, reduced, self.scale),
        )  # fmt: skip

    def photo(self, photo: Image.Image) -> Image.Image:
        """The photo as the model sees it, at the size of the other pictures."""
        shown = self.viewer.shown(photo)
        return draw_photo(shown, (16, 16))

    def _classes(self, classes: Sequence[str]) -> tuple[list[str], Tensor | None]:
        names = [name.strip() for name in classes if name.strip()]
        if not names or self._encode_text is None:
            return [], None
        if len(names) > _MOST_CLASSES or max(map(len, names)) > _MOST_LETTERS:
            raise OptionError(f"class names: at most {_MOST_CLASSES}, of {_MOST_LETTERS} letters each")
        key = tuple(names)
        if key not in self._texts:
            self._texts[key] = self._encode_text([_TEMPLATE.format(name) for name in names])
            _forget(self._texts)
        return names, self._texts[key]

    def _engine_time(self, key: str, name: str, images: Tensor) -> float:
        """Milliseconds of one image on an engine that runs the model as it is now; the export is kept."""
        from tokensieve.engines.export import make_engine

        if key not in self._engines:
            self._engines[key] = make_engine(self.viewer.model, name)
            _forget(self._engines)
        return _timed(self._engines[key], images)[1]


def _forget(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)


def _timed(call: Callable[[Tensor], Any], images: Tensor) -> tuple[Tensor, float]:
    """(output, milliseconds) of the second of two calls."""
    call(images)
    start = time.perf_counter()
    out = call(images)
    spent = 1000 * (time.perf_counter() - start)
    return (out[0] if isinstance(out, tuple) else out), spent


def _predictions(
    names: list[str], text: Tensor | None, full: Tensor, reduced: Tensor, scale: float
) -> list[tuple[str, float, float]]:
    if text is None:
        return []
    before, after = ((scale * feature @ text.T).softmax(dim=-1)[0].tolist() for feature in (full, reduced))
    rows = list(zip(names, before, after, strict=True))
    return sorted(rows, key=lambda row: row[1], reverse=True)


def load_playground(model: str, pretrained: str | None) -> Playground:
    """model: "vit-s14-minilm" (the embedded CLIP), "vit-s14" (its tower alone), or a model of open_clip with a
    checkpoint file."""
    from tokensieve.tasks.viewer import load_viewer

    if model != "vit-s14-minilm":
        viewer = load_viewer(model, pretrained)
        if not hasattr(viewer.model, "encode_text"):
            return Playground(viewer)
        import open_clip

        return _with_text(viewer, viewer.model, open_clip.get_tokenizer(model))
    if pretrained:
        raise OptionError(f"{model} brings its own weights: leave out --pretrained, or name another model")
    from tokensieve.tasks.clip.default import load_default_clip
    from tokensieve.zoo.vit_s14 import MEAN, STD

    clip, preprocess, tokenizer = load_default_clip()
    return _with_text(Viewer(model, clip, preprocess, MEAN, STD), clip, tokenizer)


def _with_text(viewer: Viewer, model: nn.Module, tokenizer: Callable[..., Tensor]) -> Playground:
    whole: Any = model

    def encode(prompts: Sequence[str]) -> Tensor:
        return F.normalize(whole.encode_text(tokenizer(list(prompts))).float(), dim=-1)

    return Playground(viewer, encode, float(whole.logit_scale.detach().exp()))
