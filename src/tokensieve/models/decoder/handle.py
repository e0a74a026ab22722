"""attach for LLaVA-style models: the handle, its budgets and its cost. Imports this folder, core and methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tokensieve.core.budget import Keep, counts_for, counts_for_average, share_out, target_count
from tokensieve.core.cost import VlmCost, decoder_macs, decoder_shape
from tokensieve.errors import BudgetError, OptionError, UnsupportedModelError, nearest
from tokensieve.methods.base import Method
from tokensieve.methods.two_stage import TwoStage
from tokensieve.models.decoder.forward import Pass
from tokensieve.models.decoder.layer import SievedDecoderLayer, attention_forms
from tokensieve.models.decoder.modules import SievedGenerator, SievedModel, SievedText
from tokensieve.models.decoder.stats import Stats
from tokensieve.models.families.base import linear_macs
from tokensieve.models.families.vlm import vlm_parts
from tokensieve.models.handle import Handle, listed_places
from tokensieve.models.swap import swapped_class

__all__ = ["PROJECTOR", "VlmAttachment", "VlmHandle", "attach_vlm", "check_positions", "is_vlm"]

PROJECTOR = -1  # the key of stage 1 in `kept` and `scores`
POSITIONS = ("original", "renumber")
SHARES = ("size", "score")  # how the images of a prompt share what it may keep


def check_positions(positions: str) -> None:
    """Raise where this is not a way to count what stage 1 keeps."""
    if positions not in POSITIONS:
        raise OptionError(f"unknown positions {positions!r}.{nearest(str(positions), POSITIONS)}")


def is_vlm(model: nn.Module) -> bool:
    """Whether this is a vision-language model of a known family. One of another family: an error."""
    return vlm_parts(model) is not None


def attach_vlm(
    model: nn.Module,
    method: Method,
    *,
    keep: Keep | None,
    at: int | Sequence[int] | None,
    keep_average: int | float | None,
    schedule: str | None,
    positions: str | None,
    max_tokens: int | None = None,
    share: str | None = None,
) -> VlmHandle:
    """`attach` for a vision-language model: see there.

    A method with both stages works at stage 1 unless `at` names layers.
    """
    handle = VlmHandle(
        model, method, keep=keep, at=at, keep_average=keep_average, schedule=schedule,
        positions=positions or "original", max_tokens=max_tokens, share=share,
    )  # fmt: skip
    handle.install()
    return handle


class VlmHandle(Handle):
    """A method at work in one vision-language model. A context manager; `.remove()` puts everything back.

    first and second: the methods of stage 1 (between tower and projector) and stage 2 (before the decoder layers `at`),
    None where there is none. What it shows is of the last prompt.
    """

    def __init__(
        self, model: nn.Module, method: Method, *, keep: Keep | None, at: int | Sequence[int] | None,
        keep_average: int | float | None, schedule: str | None, positions: str, max_tokens: int | None = None,
        share: str | None = None,
    ) -> None:  # fmt: skip
        found = vlm_parts(model)
        assert found is not None
        whole, inner, self.family = found
        check_positions(positions)
        keep = self._capped(max_tokens, share, keep, keep_average, method)
        super().__init__(method, keep=keep, keep_average=keep_average)
        self.positions = positions
        self.model, self.inner = whole, inner
        self.language = self.family.language_model(inner)
        self.blocks = self.language.layers
        self.depth = len(self._decoder)
        self.first, self.second = self._stages(method, at)
        self.at = self._layers(at)
        chosen = self.second or method
        self.schedule = schedule or chosen.schedule
        self.last: Pass | None = None
        self.new_pass: Callable[[VlmHandle], Pass] = Pass  # how a forward goes; otherwise where one is trained
        self._check()
        self.forms = attention_forms(whole, self._decoder)
        self.windowed = any(form.window is not None for form in self.forms)
        self.tower = self.family.vision_tower(inner)
        self.grid = self.family.grid(inner)
        text = inner.config.text_config
        shape = decoder_shape(
            text.hidden_size, text.intermediate_size, text.num_attention_heads, text.num_key_value_heads,
            getattr(text, "head_dim", None) or 0,
        )  # fmt: skip
        self.shapes = [shape] * self.depth
        self._counts: dict[tuple[int, int, int], dict[int, int]] = {}

    def _capped(
        self, max_tokens: int | None, share: str | None, keep: Keep | None, keep_average: int | float | None,
        method: Method,
    ) -> Keep | None:  # fmt: skip
        """Note the cap of a prompt; where nothing else is asked for, images keep what they have up to it."""
        if share is not None and (share not in SHARES or max_tokens is None):
            raise OptionError(f"share={share!r}: give max_tokens, and one of {', '.join(SHARES)}")
        self.max_tokens, self.share = max_tokens, share or SHARES[0]
        if max_tokens is None:
            return keep
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise BudgetError(f"max_tokens={max_tokens!r}: a count of vision tokens of a prompt, at least 1")
        if keep_average is not None:
            raise BudgetError("max_tokens is what a prompt keeps at the end, keep_average a layer average: give one")
        return method.own_keep() or 1.0 if keep is None else keep

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
        self.family.check(self.inner, self.first is not None)
        if self.positions == "renumber" and not self.family.renumbers:
            raise OptionError(f'positions="renumber": the positions of {self.family.name} are places in an image')
        for part in (self.first, self.second):
            if part is not None:
                text = self.inner.config.text_config
                part.check_decoder(self.depth, text.hidden_size, self.family.vision_width(self.inner))

    # -- budget ---------------------------------------------------------------------------------------------------

    @property
    def patches(self) -> int:
        """Vision tokens of one image of the usual size, before any reduction."""
        return self.family.patches(self.inner)

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

    def stage1_counts(self, sizes: list[int], weights: list[float] | None = None) -> list[int]:
        """What stage 1 leaves of the images of one prompt, from their tokens; weights: how they share a cap."""
        counts = [self.stage1_count(n) for n in sizes]
        if self.max_tokens is None or self.second is not None:
            return counts
        assert self.first is not None
        shared = share_out(self.max_tokens, counts, weights)
        return [self._single(self.first, n, k) for n, k in zip(sizes, shared, strict=True)]

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
            return min(target, enters, self.max_tokens or enters)

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
        """Vision tokens from each cut on, for a prompt of one image of that many patches; stage 1 under -1."""
        first = patches if self.first is None else self.stage1_counts([patches])[0]
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
            layer.__dict__["_sieve_attachment"] = self
            self._dress(layer, SievedDecoderLayer)
        self.language.__dict__["_sieve_attachment"] = self
        self._dress(self.language, SievedText)
        self.inner.__dict__["_sieve_attachment"] = self
        self._dress(self.inner, SievedModel)
        if self.model is not self.inner:
            self.model.__dict__["_sieve_attachment"] = self
            self._dress(self.model, SievedGenerator)

    def _dress(self, module: nn.Module, mixin: type) -> None:
        self.swap(module, swapped_class(mixin, type(module), disguised=True))

    def check_absent(self, modality: str, placeholders: Tensor, warn: bool = True) -> None:
        """A prompt that came without an image: an error where it has placeholders, else one line that says so."""
        count = int(placeholders.sum())
        if count:
            raise OptionError(
                f"the prompt has {count} {modality} placeholders, but no {modality} was given "
                f"({self.family.pixels[modality]})"
            )
        if warn and modality == "image":
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
        raise UnsupportedModelError("restore: a language model's tokens are not a grid; handle.kept says which remain")

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
        return [float(n) for n in self._planned(self.patches)]

    def cost(self, text_tokens: int | None = None, vision_tokens: int | None = None) -> VlmCost:
        """MACs of one prompt's prefill, with and without: mean over the last batch, padding not counted.

        text_tokens: a number plans for a prompt of one image and that many text tokens, whatever ran before. None takes
        the last batch; before one, a prompt of one image and no text. vision_tokens: of that image, None: as usual.
        """
        stats = self.last.stats if self.last is not None and text_tokens is None else None
        usual = vision_tokens or self.patches
        if stats is not None and stats.images:
            text, totals, left = stats.text_of_prompts, stats.vision_of_prompts, stats.vision_left
            images = stats.images / stats.batch
        else:
            text, totals, left = [text_tokens or 0], [usual], [[n] for n in self._planned(usual)]
            images = 1.0
        rows = len(text)
        macs = sum(decoder_macs(self.shapes, [text[row] + layer[row] for layer in left]) for row in range(rows))
        full = sum(decoder_macs(self.shapes, [text[row] + totals[row]] * self.depth) for row in range(rows))
        projection = self.family.projection(self.inner)
        projected = 0 if projection is None else linear_macs(projection)
        first = sum(totals) / rows
        if self.first is not None and self.family.chooses_before_projector:
            first = self.counts(usual)[PROJECTOR] * images
        tower = self.family.tower_macs(self.inner, sum(totals) / rows / max(images, 1)) * images
        return VlmCost(
            macs=round(macs / rows), macs_full=round(full / rows),
            tokens_per_layer=tuple(round((sum(text) + sum(layer)) / rows) for layer in left),
            vision_macs=round(tower + projected * first),
            vision_macs_full=round(tower + projected * sum(totals) / rows),
            vision_tokens_per_layer=tuple(sum(layer) / rows for layer in left),
        )  # fmt: skip

    def _planned(self, patches: int) -> list[int]:
        """Vision tokens of each decoder layer for a prompt of one image."""
        counts = self.counts(patches)
        current, out = counts.get(PROJECTOR, patches), []
        for layer in range(self.depth):
            current = counts.get(layer, current)
            out.append(current)
        return out


VlmAttachment = VlmHandle  # its name before
