"""`tokensieve eval vlm`: a LLaVA model with vision tokens taken out, beside the untouched one, on the same questions.

The result has the keys of `tokensieve eval`, so that report, build and table read it. Beside them: `rows`, one for each
type of question; `baseline`, the untouched model's figures of the same run; `samples`, some questions with pictures.

Imports torch; answers, compare, data and load beside it.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from tokensieve.core.budget import Keep, check_schedule
from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.methods.registry import make_method
from tokensieve.models.attach import attach
from tokensieve.models.decoder import VlmAttachment
from tokensieve.models.decoder.handle import check_positions
from tokensieve.records import hardware, versions
from tokensieve.report.pictures import jpeg_uri
from tokensieve.report.results import EVAL_FORMAT
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.vlm.answers import PROMPT, Answers, Asked, Asker, kept_patches, pictures_of
from tokensieve.tasks.vlm.compare import METRICS, Comparison, figures_of, saved, scores_of, speed_against
from tokensieve.tasks.vlm.data import draw_questions, load_image, load_questions
from tokensieve.tasks.vlm.default import SMALL_LLAVA
from tokensieve.tasks.vlm.load import load_llava
from tokensieve.tasks.vlm.smol.data import photo_questions
from tokensieve.tasks.vlm.smol.model import SMOL
from tokensieve.tasks.vlm.soft_answers import is_learned, soft_answers

__all__ = ["EVAL_SEED", "VlmEvalOptions", "attach_reduced", "evaluate_vlm", "held_out_questions", "plan_of"]

EVAL_SEED = 2_000_000  # of the generated questions; far from the seeds that training and its validations draw from
IMAGES = 200  # generated, unless said otherwise


@dataclass(frozen=True)
class VlmEvalOptions:
    """model, data: None for the shipped model and generated held-out questions; "smol" for SmolLaVA, whose generated
    questions are about test photos. method: "none" for the untouched model
    alone. images: the first N (None: all of a file, 200 generated). samples: questions shown in the report."""

    model: str | None = None
    data: Path | None = None
    method: str = "none"
    keep: Keep | None = None
    keep_average: int | float | None = None
    at: tuple[int, ...] | None = None
    schedule: str | None = None
    positions: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    images: int | None = None
    batch_size: int = 16
    metric: str = "exact"
    prompt: str = PROMPT
    new_tokens: int = 16
    samples: int = 6
    seed: int = EVAL_SEED

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise UnknownNameError(f"unknown metric {self.metric!r}.{nearest(self.metric, METRICS)}")
        if self.schedule is not None:
            check_schedule(self.schedule)
        if self.positions is not None:
            check_positions(self.positions)
        lowest = {"images": 1, "batch_size": 1, "new_tokens": 1, "samples": 0, "seed": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"--{name} {value}: at least {least}")
        if self.method == "none":
            budget = ("keep", "keep_average", "at", "schedule", "positions")
            given = [n for n in budget if getattr(self, n) is not None] + list(self.options)
            if given:
                raise OptionError(f"{given[0]} does nothing without --method: see `tokensieve methods`")


@dataclass
class Run:
    """A model, the handle of what is attached to it, and what it answered."""

    model: Any
    handle: VlmAttachment | None
    answers: Answers = field(default_factory=Answers)


def held_out_questions(images: int, seed: int = EVAL_SEED) -> list[Asked]:
    """Generated scenes of combinations that the small model has not seen, a question of each kind about each."""
    return [
        Asked(picture, f"{number:06d}", q.text, (q.answer,), q.kind)
        for number, (picture, questions) in enumerate(draw_questions(images, seed))
        for q in questions
    ]


def _questions(options: VlmEvalOptions) -> list[Asked]:
    if options.data is None:
        draw = photo_questions if options.model == SMOL else held_out_questions
        return draw(options.images or IMAGES, options.seed)
    found = [Asked(q.image, str(q.image), q.question, q.answers, q.kind) for q in load_questions(options.data)]
    chosen = set(list(dict.fromkeys(q.name for q in found))[: options.images])
    return [q for q in found if q.name in chosen]


def attach_reduced(model: Any, options: VlmEvalOptions) -> tuple[Any, VlmAttachment]:
    """A copy of the model on the same weights with the method at work, and its handle."""
    reduced = twin(model)
    at = list(options.at) if options.at else None
    handle = attach(
        reduced, make_method(options.method, **options.options), keep=options.keep, keep_average=options.keep_average,
        at=at, schedule=options.schedule, positions=options.positions,
    )  # fmt: skip
    handle = cast(VlmAttachment, handle)
    handle.timing = True  # the method's own time is one of the figures
    if options.positions is not None and handle.first is None:
        raise OptionError(f"--positions {options.positions}: {options.method} takes nothing out before the decoder")
    if options.schedule is not None and not handle.at:
        raise OptionError(f"--schedule {options.schedule}: {options.method} cuts once, before the decoder")
    return reduced, handle


def plan_of(model: Any) -> VlmAttachment:
    """A handle that keeps everything, to count what the untouched model costs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is reduced, as meant
        return cast(VlmAttachment, attach(twin(model), "random", keep=1.0))


def evaluate_vlm(
    options: VlmEvalOptions,
    *,
    command: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
    load: Callable[[str | None], tuple[Any, Any]] = load_llava,
) -> dict[str, Any]:
    """The result. progress: (questions done, questions in all). load: gives model and processor, which stay as they
    are, so that the next evaluation may have them too."""
    questions = _questions(options)
    model, processor = load(options.model)
    asker = Asker(processor, options.prompt, options.new_tokens)
    runs = [Run(model, None)]
    if options.method != "none":
        runs.append(Run(*attach_reduced(model, options)))
    begin = time.perf_counter()
    _ask_all(asker, runs, questions, options.batch_size, progress)
    plain, own = runs[0], runs[-1]
    plan = plan_of(model)
    base = figures_of(plain.answers, plan, reduced=False)
    figures = base
    against: dict[str, Any] = {"speedup": None, "possible": 1.0, "gained": None}
    if own.handle is not None:
        figures = figures_of(own.answers, plan, reduced=True)
        against = {**speed_against(own.answers, plain.answers, figures, base), **saved(figures, base)}
    untouched = Comparison(questions, plain.answers.texts, plain.answers.texts, options.metric)
    found = Comparison(questions, own.answers.texts, plain.answers.texts, options.metric)
    return {
        **_names(options),
        "metrics": {**found.metrics(), **_soft(asker, model, own.handle, questions, options)},
        **_method(options, own.handle),
        **figures,
        **against,
        **found.change(),
        "rows": found.rows(),
        "baseline": {"metrics": untouched.metrics(), **base},
        "samples": _samples(asker, own, found, options),
        "images": len({q.name for q in questions}),
        "questions": len(questions),
        "metric": options.metric,
        "batch_size": options.batch_size,
        "seed": options.seed if options.data is None else None,
        "config": json.dumps({**asdict(options), "data": str(options.data or "")}, sort_keys=True, default=str),
        **_where(model, command, time.perf_counter() - begin),
    }


def _soft(
    asker: Asker, model: Any, handle: VlmAttachment | None, questions: Sequence[Asked], options: VlmEvalOptions
) -> dict[str, float]:
    """accuracy_soft of a learned method, which is to be as good as `accuracy`, where tokens really leave."""
    if handle is None or not is_learned(handle):
        return {}
    texts = soft_answers(asker, model, handle, questions, options.batch_size)
    return {"accuracy_soft": statistics.fmean(scores_of(texts, questions, options.metric))}


def _ask_all(
    asker: Asker, runs: Sequence[Run], questions: Sequence[Asked], size: int, progress: Callable[[int, int], None]
) -> None:
    """Every batch goes to all models, which take turns to begin, so that a slow moment of the machine hits both."""
    for number, inputs in enumerate(asker.batches(questions, size)):
        if not number:
            for run in runs:  # the first call pays for what later ones find warm
                asker.ask(run.model, inputs, Answers(), run.handle)
        for run in runs if number % 2 else runs[::-1]:
            asker.ask(run.model, inputs, run.answers, run.handle)
        progress(len(runs[0].answers.texts), len(questions))


def _names(options: VlmEvalOptions) -> dict[str, Any]:
    data = "generated questions" if options.data is None else options.data.stem
    if options.data is None and options.model == SMOL:
        data = "photo questions"
    if data == "questions" and options.data is not None:
        data = options.data.resolve().parent.name
    name = SMALL_LLAVA if options.model is None else Path(options.model).name or options.model
    return {
        "format": EVAL_FORMAT,
        "dataset": data,
        "data": "" if options.data is None else str(options.data),
        "model": name,
        "pretrained": "",
        "task": "vlm",
    }


def _method(options: VlmEvalOptions, handle: VlmAttachment | None) -> dict[str, Any]:
    keep = options.keep
    return {
        "method": options.method,
        "mode": None if handle is None else "prune",
        "keep": ",".join(map(str, keep)) if isinstance(keep, Sequence) else keep,
        "keep_average": options.keep_average,
        "at": None if handle is None else ",".join(map(str, handle.at)) or None,
        "schedule": None if handle is None or not handle.at else handle.schedule,
        "positions": None if handle is None or handle.first is None else handle.positions,
        "reduced": handle is not None and handle.reduces,
        **{f"option_{name}": value for name, value in options.options.items()},
    }


def _samples(asker: Asker, run: Run, found: Comparison, options: VlmEvalOptions) -> list[dict[str, Any]]:
    """Some questions with pictures: up to half of them such where the answer changed."""
    questions = found.questions
    changed = _spread([i for i, s in enumerate(found.same) if not s], questions, math.ceil(options.samples / 2))
    others = _spread([i for i, s in enumerate(found.same) if s], questions, options.samples - len(changed))
    entries = []
    for i in changed + others:
        asked = questions[i]
        inputs = next(asker.batches([asked], 1))
        kept = grid = None
        if run.handle is not None:
            asker.ask(run.model, inputs, Answers(), run.handle)
            down, across = run.handle.grid
            if run.handle.stats.vision_of_prompts == [down * across]:  # else its tokens are not a grid of the picture
                kept, grid = kept_patches(run.handle)[0], [down, across]
        picture = _picture(asked, inputs["pixel_values"], asker.processor)
        entries.append(
            {"name": asked.name, "type": asked.kind, "question": asked.question, "answers": list(asked.answers),
             "given": found.own[i], "unpruned": found.plain[i], "score": found.scores[i],
             "score_unpruned": found.scores_plain[i], "kept": kept, "grid": grid, "picture": jpeg_uri(picture, 90)}
        )  # fmt: skip
    return entries


def _picture(asked: Asked, pixels: Tensor, processor: Any) -> Image.Image:
    """The image as the model sees it; where that is not a single picture (tiles, rows of patches), as it is."""
    if pixels.dim() == 4 and len(pixels) == 1 and pixels.shape[1] == 3:
        return pictures_of(pixels, processor)[0]
    return load_image(asked.image) if isinstance(asked.image, Path) else Image.fromarray(asked.image)


def _spread(which: Sequence[int], questions: Sequence[Asked], count: int) -> list[int]:
    """`count` of these, one of each type in turn, images that were not taken yet first."""
    chosen: list[int] = []
    types: dict[str, int] = {}
    names: set[str] = set()
    rest = list(which)
    while rest and len(chosen) < count:
        best = min(rest, key=lambda i: (questions[i].name in names, types.get(questions[i].kind, 0), i))
        rest.remove(best)
        chosen.append(best)
        names.add(questions[best].name)
        types[questions[best].kind] = types.get(questions[best].kind, 0) + 1
    return chosen


def _where(model: Any, command: str, seconds: float) -> dict[str, Any]:
    device = next(model.parameters()).device
    place = hardware(torch.get_num_threads(), torch.cuda.get_device_name() if device.type == "cuda" else device.type)
    return {
        **{name: place[name] for name in ("device", "threads", "cpu", "cores")},
        **{f"version_{name}": version for name, version in versions().items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seconds": seconds,
    }
