"""What to measure. No torch: the command line builds it before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.core.budget import check_schedule, target_count
from tokensieve.engines.names import check_engine
from tokensieve.errors import OptionError
from tokensieve.methods.registry import check_method_name

__all__ = ["METHODS", "MODELS", "PARTS", "SHARE_METHODS", "SHARE_SIZES", "VLM_METHODS", "BenchConfig", "quick"]

MODELS = {"vit-s14": (1, 16), "vit-b16": (1, 16), "vit-l14-336": (1,)}  # name -> batches where none are given
METHODS = ("anchor", "evit", "random", "sieve", "divprune", "tome")
SHARE_METHODS = ("anchor", "evit", "tome", "sieve", "divprune")
SHARE_SIZES = (196, 576, 1024, 2304, 4096)  # patches: squares, as an image gives them
VLM_METHODS = ("fastv", "pyramiddrop", "two_stage", "visionzip", "divprune")
PARTS = ("speed", "share", "memory", "vlm")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The whole configuration of one benchmark.

    batches: None takes each model's own. keep: ratios or counts of patches at the end. schedule: None takes each
    method's own. threads: None leaves the number as it is. share_sizes: patches, square numbers.
    """

    models: tuple[str, ...] = tuple(MODELS)
    batches: tuple[int, ...] | None = None
    methods: tuple[str, ...] = METHODS
    keep: tuple[int | float, ...] = (0.5, 0.25)
    schedule: str | None = None
    parts: tuple[str, ...] = ("speed",)
    rounds: int = 11
    device: str = "cpu"
    threads: int | None = None
    engine: str = "torch"
    quantize: str | None = None
    seed: int = 0
    share_methods: tuple[str, ...] = SHARE_METHODS
    share_sizes: tuple[int, ...] = SHARE_SIZES
    vlm_methods: tuple[str, ...] = VLM_METHODS

    def __post_init__(self) -> None:
        for method in self.methods + self.share_methods + self.vlm_methods:
            check_method_name(method)
        check_engine(self.engine, self.quantize, self.threads)
        if self.quantize == "int8-static":
            raise OptionError("quantize int8-static needs calibration photos: `tokensieve export` does that")
        if self.engine != "torch" and (self.parts != ("speed",) or self.device != "cpu"):
            raise OptionError(f"engine {self.engine}: only --speed is measured there, and on the CPU")
        if self.schedule is not None:
            check_schedule(self.schedule)
        for name, numbers in (("batch", self.batches), ("rounds", (self.rounds,)), ("threads", (self.threads,))):
            for number in numbers or ():
                if number is not None and number < 1:
                    raise OptionError(f"{name} {number}: at least 1")
        for keep in self.keep:
            target_count(1, keep)  # raises what is wrong with any number of patches
        for size in self.share_sizes:
            if round(size**0.5) ** 2 != size:
                raise OptionError(f"share size {size}: the patches of a square image are a square number")

    def batches_of(self, model: str) -> tuple[int, ...]:
        """The batch sizes this model is measured at."""
        return self.batches or MODELS.get(model, (1, 16))

    @property
    def vlm_batches(self) -> tuple[int, ...]:
        """The batch sizes that the vision-language model is measured at."""
        return self.batches or (1, 4)

    @property
    def steps(self) -> int:
        """How often progress will be reported: rounds with warm-up, and processes."""
        groups = sum(len(self.batches_of(model)) for model in self.models)
        each = {
            "speed": groups * (self.rounds + 1),
            "share": len(self.share_sizes) * (self.rounds + 1),
            "memory": groups * (1 + len(self.methods) * len(self.keep)),
            "vlm": 2 * len(self.vlm_batches) * (self.rounds + 1),
        }
        return sum(each[part] for part in self.parts)


def quick(**changes: object) -> BenchConfig:
    """About a minute on two cores: the real ViT-S/14 alone, batch 1 and 8, few rounds. Anything said wins."""
    base: dict[str, object] = {"models": ("vit-s14",), "batches": (1, 8), "rounds": 6, "share_sizes": SHARE_SIZES[:3]}
    return BenchConfig(**(base | changes))  # type: ignore[arg-type]
