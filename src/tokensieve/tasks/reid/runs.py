"""`tokensieve eval reid`: one result file from a checkpoint (or several, of other seeds) and a set, or from features.

The result has the keys of `tokensieve eval`, so that report, build and table read it. Beside them: `rows`, one for each
set of missing modalities and kind of ranking; `runs`, the figures of each checkpoint; `lists`, some ranked lists.

May import: torch, numpy; features, data and model beside it.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokensieve.errors import DataError, OptionError, UnknownNameError, nearest
from tokensieve.records import hardware, versions
from tokensieve.report.results import EVAL_FORMAT
from tokensieve.tasks.reid.config import ReidConfig
from tokensieve.tasks.reid.data import ReidSet, Sample, load_set
from tokensieve.tasks.reid.evaluate import Metrics, Ranking, mean_and_deviation
from tokensieve.tasks.reid.features import (
    extract_all,
    load_features,
    save_features,
    selected,
    table_of,
)
from tokensieve.tasks.reid.model import ReidModel, load_checkpoint
from tokensieve.tasks.reid.sdtps import FORMULAS, SDTPS, sdtps_counts

__all__ = ["EvalOptions", "evaluate_checkpoints", "evaluate_features", "missing_sets"]

TOP = 10  # of the gallery, in a ranked list

Found = dict[tuple[tuple[str, ...], bool], list[Metrics]]  # (missing, re-ranked) -> figures of each checkpoint


@dataclass(frozen=True)
class EvalOptions:
    """data, layout: None as the checkpoint was trained with. missing: as typed, see `missing_sets`.

    sparse_ratio, beta, formula: of SDTPS without training it again; None as it was trained. The tokens that come out of
    the aggregation are as many as ever.
    """

    data: str | None = None
    layout: str | None = None
    rerank: bool = False
    flip: bool = False
    after_neck: bool = False
    cameras: bool = True
    missing: str = ""
    lists: int = 6
    batch_size: int = 64
    workers: int = 0
    skip_broken: bool = False
    sparse_ratio: float | None = None
    beta: float | None = None
    formula: str | None = None

    def __post_init__(self) -> None:
        if self.sparse_ratio is not None and not 0 < self.sparse_ratio <= 1:
            raise OptionError(f"--sparse_ratio {self.sparse_ratio:g}: above 0, at most 1")
        if self.beta is not None and not 0 <= self.beta <= 0.5:
            raise OptionError(f"--beta {self.beta:g}: from 0 to 0.5")
        if self.formula not in (None, *FORMULAS):
            raise UnknownNameError(f"--formula {self.formula}: no such formula.{nearest(str(self.formula), FORMULAS)}")


def missing_sets(text: str, modalities: Sequence[str]) -> list[tuple[str, ...]]:
    """What to leave out, as typed: "r,rn", or "all" for everything that leaves one modality at least.

    Letters are the first ones of the modalities; whole names are joined by +, as in "rgb+nir".
    """
    if text == "all":
        return [out for n in range(1, len(modalities)) for out in itertools.combinations(modalities, n)]
    return [_missing(part.strip(), modalities) for part in text.split(",") if part.strip()]


def _missing(part: str, modalities: Sequence[str]) -> tuple[str, ...]:
    names = part.split("+")
    if not set(names) <= set(modalities):
        by_letter: dict[str, list[str]] = {}
        for name in modalities:
            by_letter.setdefault(name[:1], []).append(name)
        if any(len(by_letter.get(letter, ())) != 1 for letter in part):
            raise OptionError(
                f"--missing {part}: letters of {', '.join(modalities)} as in "
                f"{modalities[0][0]}, whole names joined by +, or all"
            )
        names = [by_letter[letter][0] for letter in part]
    chosen = tuple(name for name in modalities if name in names)
    if len(chosen) == len(modalities):
        raise OptionError(f"--missing {part}: at least one modality must be there")
    return chosen


@dataclass(frozen=True)
class _Loaded:
    path: Path
    model: ReidModel
    config: ReidConfig


def evaluate_checkpoints(
    checkpoints: Sequence[Path],
    options: EvalOptions,
    *,
    command: str = "",
    export: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The result of one model, or the mean over several of other seeds. export: the features of all modalities.

    tell: notes for the user. progress: (images done, images in all).
    """
    loaded = [_Loaded(path, *load_checkpoint(path)) for path in checkpoints]
    _same_but_for_the_seed(loaded)
    for one in loaded:
        _selecting(one, options)
    first = loaded[0]
    root = Path(options.data or first.config.DATASETS.ROOT_DIR)
    reid = load_set(options.layout or first.config.DATASETS.NAMES.lower(), root, skip_broken=options.skip_broken)
    if reid.skipped:
        tell(f"{len(reid.skipped)} broken entries of {root} are left out")
    _note_modalities(first.model, reid, tell)
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, lists = _measured(loaded, reid, root, options, export, device, progress)
    rows = _rows(found, first.model.modalities)
    plain = found[(), False][0]
    runs = zip(loaded, found[(), False], strict=True)
    return {
        **_names(first, root, reid),
        "metrics": _metrics(rows),
        **_cost(first.model),
        **_settings(options, loaded),
        "rows": rows,
        "runs": [{"checkpoint": str(one.path), "seed": one.config.SOLVER.SEED, "metrics": metrics.named()}
                 for one, metrics in runs],
        "lists": lists,
        "images": len({id(sample) for sample in (*reid.query, *reid.gallery)}),
        "queries": plain.queries,
        "unmatched": plain.unmatched,
        "config": json.dumps({"model": first.config.model_dump(), "eval": asdict(options)}, sort_keys=True),
        **_where(command, time.perf_counter() - start, device),
    }  # fmt: skip


def _measured(
    loaded: Sequence[_Loaded],
    reid: ReidSet,
    root: Path,
    options: EvalOptions,
    export: Path | None,
    device: str,
    progress: Callable[[int, int], None],
) -> tuple[Found, list[dict[str, Any]]]:
    """The figures of each checkpoint, and the first one's ranked lists."""
    gaps = [(), *missing_sets(options.missing, loaded[0].model.modalities)]
    splits: dict[str, Sequence[Sample]] = {"query": reid.query, "gallery": reid.gallery}
    done, total = 0, len({id(s) for part in splits.values() for s in part}) * len(gaps) * len(loaded)

    def tick(images: int) -> None:
        nonlocal done
        done += images
        progress(done, total)

    found: Found = {}
    lists: list[dict[str, Any]] = []
    for one, gap in itertools.product(loaded, gaps):
        model = one.model.to(device)
        features = extract_all(
            model, splits, missing=gap, flip=options.flip, after_neck=options.after_neck, cameras=options.cameras,
            batch_size=options.batch_size, workers=options.workers, tick=tick,
        )  # fmt: skip
        table = table_of(features, splits, model, reid.by_scene, _about(one, root, reid, options))
        if export and not gap:
            save_features(export, table)
        for rerank in (False, True)[: 1 + options.rerank]:
            ranking = table.rank(rerank=rerank, top=0 if gap else TOP)
            found.setdefault((gap, rerank), []).append(ranking.metrics)
            if one is loaded[0] and not gap and rerank == options.rerank:
                lists = _lists(ranking, reid, model, root, options)
    return found, lists


def evaluate_features(path: Path, options: EvalOptions, *, command: str = "") -> dict[str, Any]:
    """The result of features that were written before; what the model saw is fixed, so nothing can be missing now."""
    if options.missing:
        raise OptionError("--missing needs the model: give --checkpoint in place of --features")
    if options.flip:
        raise OptionError("--flip needs the model: give --checkpoint in place of --features")
    table = load_features(path)
    start = time.perf_counter()
    found: Found = {((), rerank): [table.rank(rerank=rerank).metrics] for rerank in (False, True)[: 1 + options.rerank]}
    rows = _rows(found, table.modalities)
    names = {key: str(table.about.get(key, "")) for key in ("dataset", "model", "pretrained", "method")}
    only = found[(), False][0]
    return {
        "format": EVAL_FORMAT,
        **names,
        "task": "reid",
        "metrics": _metrics(rows),
        **{key: table.about.get(key) for key in ("mode", "keep", "keep_average", "reduced", "seed", "checkpoint",
                                                 "option_flip", "option_after_neck")},
        **({"option_rerank": True} if options.rerank else {}),
        "features": str(path),
        "rows": rows,
        "images": len(table.names),
        "queries": only.queries,
        "unmatched": only.unmatched,
        "config": json.dumps({"features": str(path), "rerank": options.rerank}, sort_keys=True),
        **_where(command, time.perf_counter() - start, "cpu"),
    }  # fmt: skip


def _selecting(one: _Loaded, options: EvalOptions) -> None:
    """Let SDTPS select as asked for; its weights fit any number of selected patches."""
    given = {name: getattr(options, name) for name in ("sparse_ratio", "beta", "formula")}
    given = {name: value for name, value in given.items() if value is not None}
    compressor = one.model.compressor
    if not given:
        return
    if not isinstance(compressor, SDTPS):
        raise OptionError(f"--{next(iter(given))}: {one.path} selects no patches by SDTPS")
    if options.sparse_ratio is not None:
        compressor.selected, _ = sdtps_counts(compressor.tokens, options.sparse_ratio, 1.0)
    for sparse in compressor.sparse.values():
        for name, value in given.items():
            setattr(sparse, name, value)


def _same_but_for_the_seed(loaded: Sequence[_Loaded]) -> None:
    """Several checkpoints are averaged, which makes sense for seeds only."""

    def settings(one: _Loaded) -> dict[str, Any]:
        managed = {"manager_settings", "search_settings"}
        config = one.config.model_dump(exclude={"OUTPUT_DIR", "DATALOADER", "TEST", *managed})
        del config["SOLVER"]["SEED"]
        return config

    for other in loaded[1:]:
        if settings(other) != settings(loaded[0]):
            raise OptionError(
                f"{loaded[0].path} and {other.path} differ in more than the seed: evaluate them one by one"
            )


def _note_modalities(model: ReidModel, reid: ReidSet, tell: Callable[[str], None]) -> None:
    absent = [name for name in model.modalities if name not in reid.modalities]
    if len(absent) == len(model.modalities):
        raise DataError(f"the model looks at {', '.join(model.modalities)}, the set has {', '.join(reid.modalities)}")
    if absent:
        tell(f"the set has no {' and no '.join(absent)}: its part of the features is zero")


def _rows(found: Found, modalities: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each set of missing modalities and kind of ranking, means over the checkpoints."""
    rows = []
    for (gap, rerank), runs in found.items():
        mean, deviation = mean_and_deviation(runs)
        rows.append(
            {"missing": list(gap), "left": [m for m in modalities if m not in gap], "reranked": rerank,
             "metrics": mean, "deviation": deviation if len(runs) > 1 else {}, "checkpoints": len(runs)}
        )  # fmt: skip
    return rows


def _metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures of all modalities by distance, so that runs with and without re-ranking compare; it comes beside."""
    complete = {row["reranked"]: row["metrics"] for row in rows if not row["missing"]}
    more = {f"{name} re-ranked": complete[True][name] for name in ("mAP", "R1")} if True in complete else {}
    return {**complete[False], **more}


def _lists(ranking: Ranking, reid: ReidSet, model: ReidModel, root: Path, options: EvalOptions) -> list[dict[str, Any]]:
    """Ranked lists of some queries, from the worst average precision to the best, evenly spread."""
    order = [int(i) for i in np.argsort(ranking.precision, kind="stable") if not math.isnan(ranking.precision[i])]
    places = np.linspace(0, len(order) - 1, min(options.lists, len(order))).round().astype(int)
    queries = [order[place] for place in dict.fromkeys(places.tolist())]
    kept = selected(model, [reid.query[i] for i in queries], cameras=options.cameras)
    found = []
    for query, patches in zip(queries, kept, strict=True):
        ranked = ranking.lists[query]
        found.append(
            {
                "query": _entry(reid.query[query], root),
                "average_precision": float(ranking.precision[query]),
                "selected": patches,
                "grid": list(model.backbone.grid),
                "gallery": [
                    {**_entry(reid.gallery[i], root), "right": right, "distance": distance}
                    for i, right, distance in zip(ranked.gallery, ranked.right, ranked.distances, strict=True)
                ],
            }
        )
    return found


def _entry(sample: Sample, root: Path) -> dict[str, Any]:
    """An image as a report finds it again: files from the set's folder, and the part of a strip."""
    return {
        "name": sample.name, "pid": sample.pid, "camera": sample.camera, "scene": sample.scene,
        "files": {name: path.relative_to(root).as_posix() for name, path in sample.paths.items()},
        "parts": {name: list(part) for name, part in sample.parts.items()},
    }  # fmt: skip


def _method(model: ReidModel) -> dict[str, Any]:
    m = model.config.MODEL
    reduced = model.tokens_out() < model.backbone.patches
    method: str = "none" if model.compressor is None else m.SELECTION
    if method == "sdtps" and m.SDTPS_USE_GUMBEL:
        method = "sdtps (gumbel)"
    return {"method": method, "mode": "prune", "keep": model.tokens_out() if m.USE_SDTPS else None,
            "keep_average": None, "reduced": reduced}  # fmt: skip


def _about(one: _Loaded, root: Path, reid: ReidSet, options: EvalOptions) -> dict[str, Any]:
    """What a file of features says about itself."""
    facts = {**_names(one, root, reid), "seed": one.config.SOLVER.SEED}
    facts |= {"option_flip": True} if options.flip else {}
    facts |= {"option_after_neck": True} if options.after_neck else {}
    return {key: value for key, value in facts.items() if key != "format"}


def _names(one: _Loaded, root: Path, reid: ReidSet) -> dict[str, Any]:
    """Dataset, model and method as the report groups them; weights of the backbone count, the checkpoint does not."""
    m = one.config.MODEL
    return {
        "format": EVAL_FORMAT,
        "dataset": root.resolve().name,
        "layout": reid.layout,
        "data": str(root.resolve()),
        "model": m.TRANSFORMER_TYPE,
        "pretrained": Path(m.PRETRAIN_PATH).name,
        "task": "reid",
        "checkpoint": str(one.path),
        **_method(one.model),
    }


def _cost(model: ReidModel) -> dict[str, Any]:
    cost = model.cost()
    tokens = list(cost.tokens_per_layer)
    return {
        "gmacs": (cost.macs + model.compressor_macs()) / 1e9,
        "possible": cost.possible,
        "tokens_per_layer": " ".join(map(str, tokens)),
        "tokens_average": float(np.mean(tokens)),
        "tokens_pooled": model.tokens_out(),
        "at": None if model.at is None else str(model.at),
    }


def _settings(options: EvalOptions, loaded: Sequence[_Loaded]) -> dict[str, Any]:
    """Settings the table shows; options that were not given are left out."""
    m = loaded[0].config.MODEL
    given = {"rerank": options.rerank, "flip": options.flip, "after_neck": options.after_neck,
             "no_cameras": not options.cameras}  # fmt: skip
    found: dict[str, Any] = {f"option_{name}": True for name, value in given.items() if value}
    if loaded[0].model.compressor is not None and m.SELECTION == "sdtps":
        ratio = m.SDTPS_SPARSE_RATIO if options.sparse_ratio is None else options.sparse_ratio
        found |= {
            "option_formula": options.formula or m.SDTPS_FORMULA,
            "option_beta": m.SDTPS_BETA if options.beta is None else options.beta,
            **({"option_sparse_ratio": ratio} if options.sparse_ratio is not None else {}),
        }
    seeds = [one.config.SOLVER.SEED for one in loaded]
    seed = seeds[0] if len(seeds) == 1 else ", ".join(map(str, seeds))
    return {**found, "seed": seed, "batch_size": options.batch_size}


def _where(command: str, seconds: float, device: str) -> dict[str, Any]:
    place = hardware(torch.get_num_threads(), torch.cuda.get_device_name() if device == "cuda" else device)
    return {
        **{name: place[name] for name in ("device", "threads", "cpu", "cores")},
        **{f"version_{name}": version for name, version in versions().items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seconds": seconds,
    }
