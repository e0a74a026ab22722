"""What to reduce, and the name a configuration has in file names. No torch."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokensieve.core.budget import check_schedule, target_count
from tokensieve.engines.names import check_engine
from tokensieve.errors import OptionError, nearest
from tokensieve.methods.registry import check_method_name, make_method

__all__ = ["BASELINE", "MODES", "OUTPUT", "SieveConfig", "digest", "run_facts"]

MODES = ("prune", "analyse", "fuse")
OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}_{config}.json"  # of a result file

# of clip_benchmark's arguments, those that change where things lie or what is shown, not what comes out
_NO_INFLUENCE = frozenset(
    ("output", "skip_existing", "distributed", "verbose", "num_workers", "which", "model_cache_dir", "wds_cache_dir",
     "feature_root", "skip_load", "save_clf", "dump_classnames", "dump_templates", "device", "pretrained_model")
)  # fmt: skip
_PROBE_ONLY = frozenset(("task", "fewshot_k", "fewshot_epochs", "fewshot_lr", "recall_k", "batch_size"))
_PATHS = ("pretrained", "dataset_root", "annotation_file", "custom_classname_file", "custom_template_file")


@dataclass(frozen=True, kw_only=True)
class SieveConfig:
    """How tokens are reduced in one run, and where. method "none" is the untouched model; the rest as in
    `tokensieve.attach`, and as in `tokensieve.export`."""

    method: str = "none"
    mode: str = "prune"
    keep: int | float | tuple[int | float, ...] | None = None
    keep_average: int | float | None = None
    schedule: str | None = None
    at: tuple[int, ...] | None = None
    fuse_weight: float = 0.2
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "torch"
    quantize: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine, self.quantize, self.threads)
        if self.quantize == "int8-static":
            raise OptionError("--quantize int8-static needs calibration photos: `tokensieve export` takes them")
        if self.mode not in MODES:
            raise OptionError(f"--mode {self.mode}: no such mode.{nearest(self.mode, MODES)}")
        if self.schedule is not None:
            check_schedule(self.schedule)
        for keep in (*(self.keep if isinstance(self.keep, tuple) else (self.keep,)), self.keep_average):
            if keep is not None:
                target_count(1, keep)  # raises what is wrong with any number of patches
        if not self.is_baseline:
            check_method_name(self.method, also=("none",))
            make_method(self.method, **self.options)  # wrong options are errors now, not after loading a model

    @property
    def is_baseline(self) -> bool:
        return self.method == "none"

    @property
    def slug(self) -> str:
        """A short readable name: what differs from the defaults."""
        where = [] if self.engine == "torch" else [self.engine, *([self.quantize] if self.quantize else [])]
        if self.is_baseline:
            return "-".join(["none", *where])
        parts = [self.method, *where]
        parts += [] if self.keep is None else [_short(self.keep)]
        parts += [] if self.keep_average is None else [f"avg{self.keep_average}"]
        parts += [] if self.mode == "prune" else [self.mode]
        parts += [] if self.schedule is None else [self.schedule]
        parts += [] if self.at is None else ["at" + _short(self.at)]
        parts += [f"{name}{value}" for name, value in sorted(self.options.items())]
        return re.sub(r"[^\w.,-]+", "", "-".join(parts))[:60]

    def plain(self) -> dict[str, Any]:
        """As plain data, for the record. A trained adapter is named by what is in it too: files are written anew."""
        plain = asdict(self) | {"options": dict(self.options)}
        for name in ("engine", "quantize", "threads"):  # only where it was asked for: older results stay found
            if plain[name] == getattr(BASELINE, name):
                del plain[name]
        adapter = self.options.get("adapter")
        if adapter:
            from tokensieve.methods.trained.learned import adapter_file  # brings torch, as the adapter itself will

            plain["adapter_sha256"] = hashlib.sha256(adapter_file(adapter).read_bytes()).hexdigest()
        return plain


BASELINE = SieveConfig()


def _short(numbers: Any) -> str:
    return ",".join(map(str, numbers)) if isinstance(numbers, tuple) else str(numbers)


def run_facts(args: Namespace, *, features_only: bool = False) -> dict[str, Any]:
    """Those of clip_benchmark's arguments that change the result, paths made absolute.

    features_only: those that change the image features, that is without the settings of what is done with them.
    """
    left_out = _NO_INFLUENCE | (_PROBE_ONLY if features_only else frozenset())
    facts = {name: value for name, value in vars(args).items() if name not in left_out}
    for name in _PATHS:
        value = facts.get(name)
        if isinstance(value, str) and value and Path(value).exists():
            facts[name] = str(Path(value).resolve())
    return facts


def digest(*parts: Any) -> str:
    """Eight hexadecimal digits that stand for the parts."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
