"""attach for LLaVA-style models: the handle, its budgets and its cost. Imports this folder, core and methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from tokensieve.core.budget import Keep, counts_for, counts_for_average, target_count
from tokensieve.core.cost import VlmCost, decoder_macs, decoder_shape, encoder_cost
from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError, nearest
from tokensieve.methods.base import Method
from tokensieve.methods.two_stage import TwoStage
from tokensieve.models.decoder.forward import Pass
from tokensieve.models.decoder.modules import SievedDecoderLayer, SievedGenerator, SievedLlava
from tokensieve.models.decoder.stage1 import inner_tower
from tokensieve.models.decoder.stats import Stats
from tokensieve.models.families.base import has, linear_macs
from tokensieve.models.families.transformers import ClipFamily
from tokensieve.models.handle import Handle, listed_places
from tokensieve.models.swap import swapped_class
from tokensieve.models.wrappers import unwrapped

__all__ = ["PROJECTOR", "VlmAttachment", "VlmHandle", "attach_vlm", "check_positions", "is_vlm"]

PROJECTOR = -1  # the key of stage 1 in `kept` and `scores`
POSITIONS = ("original", "renumber")


def check_positions(positions: str) -> None:
    """Raise where this is no way to count what stage 1 keeps."""
    if positions not in POSITIONS:
        raise OptionError(f"unknown positions {positions!r}.{nearest(str(positions), POSITIONS)}")


_LLAVA = ("LlavaModel", "LlavaNextModel")
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
_PARTS = ("vision_tower", "multi_modal_projector", "language_model.layers")


def _inner(model: nn.Module) -> Any:
    """The `LlavaModel` in a model, or None."""
    whole = unwrapped(model)
    for module in (whole, getattr(whole, "model", None)):
        if module is not None and has(module, *_PARTS):
            return module
    return None


def is_vlm(model: nn.Module) -> bool:
    """Whether this is a model of vision tower, projector and language model. One that is but is not known: an error."""
    whole = unwrapped(model)
    if has(whole, "model.visual", "model.language_model.layers"):
        raise UnsupportedModelError(
            f"{type(whole).__name__} is not supported: of vision-language models LLaVA is, and LLaVA-NeXT inside the "
            "language model. Its vision tower alone may be: attach to model.model.visual"
        )
    return _inner(model) is not None


def attach_vlm(
    model: nn.Module,
    method: Method,
    *,
    keep: Keep | None,
    at: int | Sequence[int] | None,
    keep_average: int | float | None,
    schedule: str | None,
    positions: str | None,
) -> VlmHandle:
    """`attach` for a LLaVA model: see there. A method with both stages works at stage 1 unless `at` names layers."""
    handle = VlmHandle(
        model, method, keep=keep, at=at, keep_average=keep_average, schedule=schedule, positions=positions or "original"
    )
    handle.install()
    return handle


class VlmHandle(Handle):
    """A method at work in one LLaVA model. A context manager; `.remove()` puts everything back.

    first and second: the methods of stage 1 (between tower and projector) and stage 2 (before the decoder layers `at`),
    None where there is none. What it shows is of the last prompt.
    """

    def __init__(
        self, model: nn.Module, method: Method, *, keep: Keep | None, at: int | Sequence[int] | None,
        keep_average: int | float | None, schedule: str | None, positions: str,
    ) -> None:  # fmt: skip
        whole, inner = unwrapped(model), _inner(model)
        check_positions(positions)
        super().__init__(method, keep=keep, keep_average=keep_average)
        self.positions = positions
        self.model, self.inner = whole, inner
        self.blocks = inner.language_model.layers
        self.depth = len(self._decoder)
        self.first, self.second = self._stages(method, at)
        self.at = self._layers(at)
        chosen = self.second or method
        self.schedule = schedule or chosen.schedule
        self.last: Pass | None = None
        self.new_pass: Callable[[VlmHandle], Pass] = Pass  # how a forward goes; otherwise where one is trained
        self._check()
        self.tower = inner_tower(inner.vision_tower)
        self.grid = ClipFamily().grid(self.tower)
        text = inner.config.text_config
        shape = decoder_shape(
            text.hidden_size, text.intermediate_size, text.num_attention_heads, text.num_key_value_heads,
            getattr(text, "head_dim", None) or 0,
        )  # fmt: skip
        self.shapes = [shape] * self.depth
        self._counts: dict[tuple[int, int, int], dict[int, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are attached; what was seen last stays here."""
        return self.__dict__ | {"last": None}

    @property
    def _decoder(self) -> list[nn.Module]:
        return list(self.blocks.children())

    def _stages(self, method: Method, at: object) -> tuple[Method | None, Method | None]:
        if isinstance(method, TwoStage):
            return method.parts
        if at is None and "projector" in method.stages:
            return method, None
        if "decoder" in method.stages:
            return None, method
        if "projector" in method.stages:
            raise OptionError(f"at={at}: {type(method).__name__} works between vision tower and projector only")
        raise UnsupportedModelError(
            f"{type(method).__name__} works inside a vision encoder: attach it to the model's vision_tower"
        )

    def _layers(self, at: int | Sequence[int] | None) -> tuple[int, ...]:
        if self.second is None:
            return ()
        lowest = 1 if self.second.reads_attention else 0
        wanted = f"tokens can leave before decoder layers {lowest} to {self.depth - 1}"
        places = self.second.layers(self.depth) if at is None else listed_places(at, wanted)
        for place in places:
            if not lowest <= place < self.depth:
                raise OptionError(f"at={place}: {wanted}")
        if not places or len(set(places)) != len(places):
            raise OptionError(f"at={list(places)}: give each layer once, and at least one")
        return tuple(sorted(places))

    def _check(self) -> None:
        """Refuse what cannot be reduced."""
        name = type(self.inner).__name__
        if name not in _LLAVA:
            raise UnsupportedModelError(
                f"{name} is not supported: of vision-language models LLaVA is, and LLaVA-NeXT inside the language model"
            )
        if self.first is not None and name != "LlavaModel":
            raise UnsupportedModelError(
                f"stage 1 in {name}: its images have tiles and line ends; inside the language model (at=...) it works"
            )
        layer = type(self._decoder[0]).__name__
        if layer not in _LAYERS:
            raise UnsupportedModelError(f"a language model of {layer} is not supported: known are {', '.join(_LAYERS)}")
        if getattr(self.inner.config.text_config, "sliding_window", None):
            raise UnsupportedModelError("a language model with a sliding window is not supported")
        if not ClipFamily().matches(inner_tower(self.inner.vision_tower)):
            raise UnsupportedModelError(f"the vision tower is to be {ClipFamily.name}")
        for part in (self.first, self.second):
            if part is not None:
                vision, text = self.inner.config.vision_config, self.inner.config.text_config
                layers = self.inner.config.vision_feature_layer
                part.check_decoder(
                    self.depth, text.hidden_size, vision.hidden_size * (1 if isinstance(layers, int) else len(layers))
                )

    # -- budget ---------------------------------------------------------------------------------------------------

    @property
    def patches(self) -> int:
        """Vision tokens of one image of the usual size, before any reduction."""
        with_cls = self.inner.config.vision_feature_select_strategy != "default"
        return self.grid[0] * self.grid[1] + (ClipFamily().prefix(self.tower) if with_cls else 0)

    def stage1_count(self, n: int) -> int:
        """Tokens of an image of n that stage 1 leaves."""
        if self.first is None:
            return n
        if isinstance(self.method, TwoStage):
            return self._single(self.first, n, self.method.first_keep(self.keep_average))
        budget = self.keep_average if self.keep is None else self.keep
        assert budget is not None
        return self._single(self.first, n, budget)

    @staticmethod
    def _single(method: Method, n: int, keep: Keep) -> int:
        return counts_for(n, 1, keep, "constant", lambda m: method.floor(m, 1))[0]

    def stage2_counts(self, total: int, enters: int, images: int) -> dict[int, int]:
        """layer -> vision tokens from it on, of a prompt whose `images` gave `total` and of which `enters` are left.

        A count is of one image, so a prompt of two keeps twice as many; ratios are of the total.
        """
        if self.second is None or not total:
            return dict.fromkeys(self.at, enters)
        found = self._counts.get((total, enters, images))
        if found is None:
            found = self._counts[total, enters, images] = self._solve(total, enters, images)
        return found

    def _solve(self, total: int, enters: int, images: int) -> dict[int, int]:
        second = self.second
        assert second is not None

        def end(keep: int | float) -> int:
            """A budget as a count of what enters the decoder."""
            target = target_count(total, keep * images if isinstance(keep, int) else keep)
            return min(target, enters)

        def floor(n: int) -> int:
            return second.floor(n, 0)

        if self.keep_average is not None:
            return dict(zip(self.at, self._average(end(self.keep_average), enters, total, floor), strict=True))
        keep = self.keep
        assert keep is not None
        wanted: Keep = [end(k) for k in keep] if isinstance(keep, Sequence) else end(keep)
        return dict(zip(self.at, counts_for(enters, len(self.at), wanted, self.schedule, floor), strict=True))

    def _average(self, target: int, enters: int, total: int, floor: Any) -> list[int]:
        try:
            return counts_for_average(enters, self.at, self.depth, target, self.schedule, floor)
        except BudgetError:
            lowest = sum(enters if layer < self.at[0] else 1 for layer in range(self.depth)) / self.depth
            raise BudgetError(
                f"keep_average={self.keep_average} asks for {target} of {total} vision tokens on layer average, but "
                f"with cuts before layers {', '.join(map(str, self.at))} of {self.depth} it cannot go under "
                f"{lowest:.1f} ({lowest / total:.3f}): cut earlier"
            ) from None

    def counts(self, patches: int) -> dict[int, int]:
        """Vision tokens from each cut on, for a prompt of one image of so many patches; stage 1 under -1."""
        first = self.stage1_count(patches)
        stage1 = {} if self.first is None else {PROJECTOR: first}
        return stage1 | self.stage2_counts(patches, first, 1)

    @property
    def reduces(self) -> bool:
        return min(self.counts(self.patches).values()) < self.patches

    # -- in and out -----------------------------------------------------------------------------------------------

    def _change(self) -> None:
        if not self.reduces:
            warnings.warn(f"nothing is reduced: the budget keeps all {self.patches} vision tokens", stacklevel=5)
        for index, layer in enumerate(self._decoder):
            layer.__dict__["_sieve_index"] = index
            self._dress(layer, SievedDecoderLayer)
        self.inner.__dict__["_sieve_attachment"] = self
        self._dress(self.inner, SievedLlava)
        if self.model is not self.inner:
            self.model.__dict__["_sieve_attachment"] = self
            self._dress(self.model, SievedGenerator)

    def _dress(self, module: nn.Module, mixin: type) -> None:
        self.swap(module, swapped_class(mixin, type(module), disguised=True))

    def warn_without_image(self, placeholders: Tensor) -> None:
        """A prompt that came without an image: an error where it has placeholders, else one line that says so."""
        count = int(placeholders.sum())
        if count:
            raise OptionError(f"the prompt has {count} image placeholders, but no image was given (pixel_values)")
        warnings.warn("the prompt has no image: nothing is reduced", stacklevel=2)

    # -- what the user asks ---------------------------------------------------------------------------------------

    @property
    def _run(self) -> Pass:
        if self.last is None:
            raise RuntimeError("no forward yet: run the model first")
        return self.last

    @property
    def stats(self) -> Stats:
        """Tokens, bytes and seconds of the last prompt and of what was generated from it."""
        return self._run.stats

    @property
    def kept(self) -> dict[int, Tensor]:
        """layer -> (B, K) numbers of the vision tokens that remain from it on, ascending; stage 1 under -1.

        Image i of a prompt has the numbers i * N to (i + 1) * N - 1. -1 where a row of the batch has fewer.
        """
        return dict(self._run.kept)

    @property
    def scores(self) -> dict[int, Tensor]:
        """layer -> (B, N) scores of all the prompt's vision tokens; NaN where one had left before, or has none."""
        return dict(self._run.scores)

    @property
    def sizes(self) -> Tensor | None:
        """(B, L) patches that each token after the last cut stands for; None where nothing was averaged by size."""
        return self._run.stretch_of(self.depth - 1).size

    def restore(self, tokens: Tensor) -> Tensor:
        raise UnsupportedModelError("restore: a language model's tokens are no grid; handle.kept says which remain")

    @property
    def tokens_per_layer(self) -> list[int]:
        """Tokens that each decoder layer runs on, text included: of the last prompt; before one, the vision tokens."""
        if self.last is not None and self.last.stats.tokens_per_layer:
            return list(self.last.stats.tokens_per_layer)
        return [round(n) for n in self.vision_tokens_per_layer]

    @property
    def vision_tokens_per_layer(self) -> list[float]:
        """Vision tokens that each decoder layer runs on: of the last prompt (mean over rows), before it as planned."""
        if self.last is not None and self.last.stats.vision_tokens_per_layer:
            return list(self.last.stats.vision_tokens_per_layer)
        return [float(n) for n in self._planned()]

    def cost(self, text_tokens: int | None = None) -> VlmCost:
        """MACs of one prompt's prefill, with and without: mean over the last batch, padding not counted.

        text_tokens: a number plans for a prompt of one image and so many text tokens, whatever ran before. None takes
        the last batch; before one, a prompt of one image and no text.
        """
        stats = self.last.stats if self.last is not None and text_tokens is None else None
        if stats is not None and stats.images:
            text, totals, left = stats.text_of_prompts, stats.vision_of_prompts, stats.vision_left
            images = stats.images / stats.batch
        else:
            text, totals, left = [text_tokens or 0], [self.patches], [[n] for n in self._planned()]
            images = 1.0
        rows = len(text)
        macs = sum(decoder_macs(self.shapes, [text[row] + layer[row] for layer in left]) for row in range(rows))
        full = sum(decoder_macs(self.shapes, [text[row] + totals[row]] * self.depth) for row in range(rows))
        projected = linear_macs(self.inner.multi_modal_projector)
        first = self.stage1_count(self.patches) * images if self.first is not None else sum(totals) / rows
        tower = self._tower_macs() * images
        return VlmCost(
            macs=round(macs / rows), macs_full=round(full / rows),
            tokens_per_layer=tuple(round((sum(text) + sum(layer)) / rows) for layer in left),
            vision_macs=round(tower + projected * first),
            vision_macs_full=round(tower + projected * sum(totals) / rows),
            vision_tokens_per_layer=tuple(sum(layer) / rows for layer in left),
        )  # fmt: skip

    def _planned(self) -> list[int]:
        """Vision tokens of each decoder layer for a prompt of one image."""
        counts = self.counts(self.patches)
        current, out = counts.get(PROJECTOR, self.patches), []
        for layer in range(self.depth):
            current = counts.get(layer, current)
            out.append(current)
        return out

    def _tower_macs(self) -> int:
        """The vision tower on one image: all its blocks, as transformers runs them."""
        family = ClipFamily()
        blocks = list(cast(Any, family.blocks(self.tower)))
        grid = self.grid[0] * self.grid[1]
        tokens = family.prefix(self.tower) + grid
        shapes = [family.shape(block) for block in blocks]
        return encoder_cost(shapes, tokens, [tokens] * len(blocks), family.rest_macs(self.tower, grid)).macs_full


VlmAttachment = VlmHandle  # its name before
