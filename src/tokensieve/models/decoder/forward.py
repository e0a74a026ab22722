"""One forward through the decoder: where its vision tokens are, and the cuts between its layers.

`LlavaModel` opens it, and it travels to every decoder layer as an argument; nothing is shared between forwards. Imports
core, memory and stats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokensieve.core.prompt import Sentence
from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError
from tokensieve.methods.base import Method
from tokensieve.models.decoder.memory import Memory, Reach, attention_mask, check_cache, join_keys, past_length
from tokensieve.models.decoder.stats import Stats, timed

if TYPE_CHECKING:
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["Layout", "Pass", "Stretch", "key_bias_of", "marked_places", "question_mask"]

Rotary = tuple[Tensor, Tensor]
Found = tuple[list[int], Tensor, Tensor, Reduction | None]  # rows, their vision tokens' places, those kept, why


def marked_places(mask: Tensor, count: int) -> Tensor:
    """Where mask (B, L) is True, in order: (B, count). Rows with fewer are filled up with the first False places."""
    length = mask.shape[1]
    rank = mask.long() * (2 * length) - torch.arange(length, device=mask.device)
    return rank.topk(count, dim=1).indices.sort(dim=1).values


def question_mask(vision: Tensor, valid: Tensor | None) -> Tensor:
    """(B, L) bool: the text after the last vision token; where there is none, all text."""
    text = ~vision if valid is None else ~vision & valid
    place = torch.arange(vision.shape[1], device=vision.device)
    last = (vision * place).amax(dim=1, keepdim=True)
    after = text & (place > last)
    return torch.where(after.any(dim=1, keepdim=True), after, text)


def key_bias_of(method: Method, size: Tensor) -> Tensor | None:
    """What attention adds to the logits of tokens that stand for `size` each: a method's `proportional` says."""
    return size.log() * float(method.proportional) if method.proportional else None


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _take_rotary(rotary: Rotary, index: Tensor) -> Rotary:
    """cos and sin (1 or B, L, d) at the places `index` (B, K)."""
    cos, sin = (part.expand(index.shape[0], -1, -1) for part in rotary)
    return take_tokens(cos, index), take_tokens(sin, index)


@dataclass
class Layout:
    """The sequence that enters layer 0. `vision` is None where nothing is to be reduced: text alone, a decode step.

    vision: (B, L) bool. origin: (B, L) the number of each vision token among its prompt's, before stage 1.
    counts: for each row, layer -> vision tokens from it on. place: (B, L) where a token stood in the prompt, before
    stage 1; None: where it stands. valid: (B, L), False for padding; None: all count. gaps: positions leave some out.
    """

    vision: Tensor | None = None
    origin: Tensor | None = None
    counts: list[dict[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # vision tokens of each row that enter layer 0
    place: Tensor | None = None
    valid: Tensor | None = None
    gaps: bool = False
    size: Tensor | None = None  # (B, L) patches each token stands for, where stage 1 averaged something
    key_bias: Tensor | None = None  # (B, L) what attention adds to the logits of such a token's key
    blocks: Tensor | None = None  # (B, L) tokens of the same number see each other both ways; -1: only what is before
    streams: list[Tensor] = field(default_factory=list)  # (B, L, D) what is added to the tokens after each first layer
    own_mask: bool = False  # the model's own mask is of a longer prompt


@dataclass
class Stretch:
    """Layers from one cut to the next, from `start` on. base: (B, L') which tokens of layer 0's sequence are left.

    None: all. valid: (B, L') of the new tokens; None: all count. own_mask: the layers get a mask of ours, not the
    model's own; `masks` has it for each window.
    """

    start: int
    base: Tensor | None = None
    valid: Tensor | None = None
    size: Tensor | None = None  # (B, L') patches each token stands for, where something was averaged
    left: list[int] = field(default_factory=list)
    own_mask: bool = False
    key_bias: Tensor | None = None  # (B, L') what is added to the new tokens' keys' logits, for what they stand for
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    _rotaries: dict[int, tuple[Rotary, Rotary]] = field(default_factory=dict)

    def turned(self, rotary: Rotary) -> Rotary:
        """cos and sin that a layer was handed for layer 0's sequence, of the tokens that are left."""
        if self.base is None:
            return rotary
        if id(rotary[0]) not in self._rotaries:  # models with windows have two tables
            self._rotaries[id(rotary[0])] = rotary, _take_rotary(rotary, self.base)
        return self._rotaries[id(rotary[0])][1]


class Pass:
    """One forward. Layers call `enter` and `leave`; what was decided stays readable afterwards."""

    def __init__(self, attachment: VlmAttachment) -> None:
        self.attachment = attachment
        self.layout = Layout()
        self.memory = Memory(Stats())
        self.reductions: dict[int, list[Reduction]] = {}
        self.kept: dict[int, Tensor] = {}  # -1: stage 1
        self.scores: dict[int, Tensor] = {}
        self.prefill = False
        self.length = 0  # tokens of this forward before any left, padding included
        self.columns = 0  # the same with all that came before it
        self.following: Tensor | None = None  # (B or 1, 1) the position after this forward's last
        self.stays: Tensor | None = None  # (B, L) bool: the tokens that stage 1 leaves in the prompt
        self.stretches: dict[int, Stretch] = {}
        self._embeds: Tensor | None = None
        self._before: dict[int, tuple[Any, Tensor, Rotary, Any]] = {}  # cut -> layer before, its input, rotation, cache

    @property
    def stats(self) -> Stats:
        return self.memory.stats

    def stretch_of(self, layer: int) -> Stretch:
        """The stretch that a layer is in."""
        return self.stretches[max(start for start in self.stretches if start <= layer)]

    # -- what the layers call -------------------------------------------------------------------------------------

    def enter(self, index: int, hidden: Tensor, rotary: Rotary, cache: Any, kind: str) -> tuple[Tensor, Stretch]:
        """Before layer `index`: cut if this is a place for it. The tokens that go on, and what belongs to them."""
        if index == 0 and not self.stretches:
            self._start(hidden, cache, kind)
        if index in self.attachment.at:
            hidden = self._turn(index, hidden, rotary, cache, kind)
        stretch = self.stretch_of(index)
        if self.prefill:
            self._count(index, hidden, stretch)
        return hidden, stretch

    def leave(self, index: int, layer: Any, hidden: Tensor, rotary: Rotary, cache: Any) -> None:
        """After layer `index`, which got `hidden`: what a cut right after it may want to see."""
        if index + 1 in self.attachment.at and self.layout.vision is not None:
            self._before[index + 1] = (layer, hidden, rotary, cache)

    def mask_of(
        self, index: int, stretch: Stretch, given: Tensor | None, hidden: Tensor, cache: Any, kind: str
    ) -> Tensor | None:
        """The mask of a layer; given: the model's own."""
        if not stretch.own_mask:
            return given
        window = self.attachment.forms[index].window
        if window not in stretch.masks:
            valid, key_bias = self._keys_known(stretch)
            here = hidden.shape[1]
            keys = past_length(cache, index) + here
            mask = attention_mask(kind, valid, here, keys, hidden, key_bias, self._reach(stretch, window, here))
            if mask is not None and window is not None and cache is not None and cache.layers:
                held = cache.layers[index].get_mask_sizes(here)[0]  # a cache with a window lets go of the first keys
                mask = mask[..., -held:]
            stretch.masks[window] = mask
        return stretch.masks[window]

    def with_streams(self, index: int, stretch: Stretch, hidden: Tensor) -> Tensor:
        """A layer's output (B, L', D) with the features that the tower adds after it (deepstack)."""
        if index >= len(self.layout.streams):
            return hidden
        stream = self.layout.streams[index]
        return hidden + (stream if stretch.base is None else take_tokens(stream, stretch.base))

    def _keys_known(self, stretch: Stretch) -> tuple[Tensor | None, Tensor | None]:
        """(B, keys) which keys of a stretch's layers count, and what is added to their logits."""
        return self.memory.valid.get(stretch.start), self.memory.key_bias.get(stretch.start)

    def _reach(self, stretch: Stretch, window: int | None, here: int) -> Reach | None:
        """What bounds or widens the mask of layers with this window; None where causality alone says it."""
        place = self.memory.place.get(stretch.start)
        if window is not None and self.columns <= window:
            window = None
        blocks = self.layout.blocks
        if blocks is not None and stretch.base is not None:
            blocks = blocks.gather(1, stretch.base)
        if window is None and blocks is None:
            return None
        return Reach(window, place, blocks, self.attachment.family.blocks_in_window)

    def close(self, cache: Any) -> None:
        """Note where the next forward goes on, and let go of what only a cut, or a checkpointed layer's second run, may
        want to see."""
        self.memory.note_end(cache, self.columns, self.following)
        if not torch.is_grad_enabled():
            self._before, self._embeds = {}, None

    def final_places(self) -> Tensor | None:
        """(B, L') where the tokens that left the last layer stood in the prompt; -1 for fillers. None: all are left."""
        stretch = self.stretch_of(self.attachment.depth - 1)
        if stretch.base is None:
            return self.layout.place
        place = stretch.base if self.layout.place is None else self.layout.place.gather(1, stretch.base)
        return place if stretch.valid is None else place.masked_fill(~stretch.valid, -1)

    # -- stretches ------------------------------------------------------------------------------------------------

    def _start(self, hidden: Tensor, cache: Any, kind: str) -> None:
        if cache is not None:
            check_cache(cache)
            self.memory.keep_on(cache)
        self._embeds, at = hidden, self.layout
        stretch = Stretch(0, valid=at.valid, size=at.size, left=at.left, key_bias=at.key_bias)
        stretch.own_mask = at.own_mask or 0 in self.memory.place
        self.stretches = {-1: stretch}
        if 0 not in self.attachment.at:
            self._remember(stretch, hidden, cache)

    def _remember(self, stretch: Stretch, hidden: Tensor, cache: Any) -> None:
        """Note which keys of the layers from the stretch's first on count and how much."""
        memory, (batch, here), start = self.memory, hidden.shape[:2], stretch.start
        past = past_length(cache, start)
        valid = join_keys(memory.valid.get(start), stretch.valid, batch, past, here, hidden, True)
        key_bias = join_keys(memory.key_bias.get(start), stretch.key_bias, batch, past, here, hidden, 0.0)
        memory.valid[start], memory.key_bias[start] = valid, key_bias
        stretch.own_mask = stretch.own_mask or key_bias is not None
        if self.attachment.windowed and (
            stretch.base is not None or self.layout.place is not None or start in memory.place
        ):
            memory.place[start] = self._places(stretch, hidden, past)

    def _places(self, stretch: Stretch, hidden: Tensor, past: int) -> Tensor:
        """(B, past + L') where each key stood before any left."""
        (batch, here), memory = hidden.shape[:2], self.memory
        first = self.columns - self.length
        new = torch.arange(self.length, device=hidden.device).expand(batch, -1)
        new = new if self.layout.place is None else self.layout.place
        new = first + (new if stretch.base is None else new.gather(1, stretch.base))
        old = memory.place.get(stretch.start)
        if old is None:
            old = torch.arange(past, device=hidden.device).expand(batch, -1)
        return torch.cat([old[:, :past], new[:, -here:]], dim=1)

    def _turn(self, index: int, hidden: Tensor, rotary: Rotary, cache: Any, kind: str) -> Tensor:
        """Begin the stretch of layer `index`, with fewer tokens where there are vision tokens to leave."""
        before = self.stretch_of(index - 1)
        stretch = Stretch(index, before.base, before.valid, before.size, before.left, key_bias=before.key_bias)
        if self.layout.vision is not None:
            hidden = self._cut(index, hidden, rotary, before, stretch)
        self.stretches[index] = stretch
        stretch.own_mask = stretch.base is not None or before.own_mask or bool(past_length(cache, index))
        self._remember(stretch, hidden, cache)
        return hidden

    def _count(self, index: int, hidden: Tensor, stretch: Stretch) -> None:
        stats = self.stats
        if len(stats.tokens_per_layer) == index:  # a checkpointed layer comes twice
            stats.tokens_per_layer.append(hidden.shape[1])
            stats.vision_left.append(list(stretch.left))

    # -- cutting --------------------------------------------------------------------------------------------------

    def _cut(self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch, after: Stretch) -> Tensor:
        """Ask the method, row group by row group, and let go of what it does not keep: (B, L, D) -> (B, L', D)."""
        wanted = [counts[index] for counts in self.layout.counts]
        if all(n <= k for n, k in zip(before.left, wanted, strict=True)):
            self._note_all(index, before)
            return hidden
        with timed(self.stats, "overhead_seconds", hidden.device, self.attachment.timing):
            vision = self._vision(before)
            keep = ~vision
            size = before.size
            groups: dict[tuple[int, int], list[int]] = {}
            for row, (n, k) in enumerate(zip(before.left, wanted, strict=True)):
                groups.setdefault((n, min(n, k)), []).append(row)
            found: list[Found] = []
            for (n, k), members in groups.items():
                rows = None if len(groups) == 1 else torch.tensor(members, device=hidden.device)
                place = marked_places(_rows(vision, rows), n)
                if k == n:
                    kept, reduction = place, None
                else:
                    reduction, kept, hidden, size = self._reduce(index, hidden, rotary, before, rows, place, k, size)
                keep = _mark(keep, rows, kept)
                found.append((members, place, kept, reduction))
            self._note(index, before, found)
            after.left = [min(n, k) for n, k in zip(before.left, wanted, strict=True)]
            after.size, after.key_bias = size, before.key_bias
            if size is not None and size is not before.size:
                assert self.attachment.second is not None
                after.key_bias = key_bias_of(self.attachment.second, size)
            return self._let_go(hidden, keep, before, after)

    def _reduce(
        self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch, rows: Tensor | None, place: Tensor,
        keep: int, size: Tensor | None,
    ) -> tuple[Reduction, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """One group of rows: what the method said, which places stay, the tokens with what was averaged into them."""
        method = self.attachment.second
        assert method is not None
        learns = method.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            view = self._view(index, hidden, rotary, before, rows, place)
            reduction = method.reduce(view, keep)
        kept = place.gather(1, reduction.keep)
        if reduction.extra is not None:
            raise OptionError(f"{type(method).__name__} makes extra tokens, which have no place in a prompt")
        if type(reduction) is Reduction and reduction.into is None:
            return reduction, kept, hidden, size
        weights = None if size is None else _rows(size, rows).gather(1, place)
        mixed, weights = reduction.apply(view.tokens, size=weights)
        every = torch.arange(hidden.shape[0], device=hidden.device) if rows is None else rows
        hidden = hidden.index_put((every.unsqueeze(1), kept), mixed)
        if weights is not None:
            whole = torch.ones(hidden.shape[:2], device=hidden.device) if size is None else size
            size = whole.index_put((every.unsqueeze(1), kept), weights)
        return reduction, kept, hidden, size

    def _let_go(self, hidden: Tensor, keep: Tensor, before: Stretch, after: Stretch) -> Tensor:
        """Gather all that belongs to the tokens that stay. Rows that lose more are filled up with tokens that no other
        sees, so that the batch stays rectangular."""
        stays = [int(hidden.shape[1]) - n + k for n, k in zip(before.left, after.left, strict=True)]
        length = max(stays)
        index = marked_places(keep, length)
        valid = None if before.valid is None else before.valid.gather(1, index)
        if min(stays) < length:
            filled = keep.gather(1, index)
            valid = filled if valid is None else filled & valid
        after.base = index if before.base is None else before.base.gather(1, index)
        after.valid = valid
        after.size = None if after.size is None else after.size.gather(1, index)
        after.key_bias = None if after.key_bias is None else after.key_bias.gather(1, index)
        return take_tokens(hidden, index)

    # -- what a method may look at --------------------------------------------------------------------------------

    def _at_base(self, what: Tensor, stretch: Stretch) -> Tensor:
        """(B, L0) facts of layer 0's sequence -> of the tokens that are left."""
        return what if stretch.base is None else what.gather(1, stretch.base)

    def _vision(self, stretch: Stretch) -> Tensor:
        assert self.layout.vision is not None
        vision = self._at_base(self.layout.vision, stretch)
        return vision if stretch.valid is None else vision & stretch.valid

    def asked(self, vision: Tensor, valid: Tensor | None) -> Tensor:
        """(B, L) bool: the question, see `question_mask`."""
        return question_mask(vision, valid)

    def _origin(self, stretch: Stretch) -> Tensor:
        assert self.layout.origin is not None
        return self._at_base(self.layout.origin, stretch)

    def _view(
        self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch, rows: Tensor | None, place: Tensor
    ) -> TokenView:
        assert self._embeds is not None
        assert self.layout.vision is not None
        embeds = _rows(self._embeds, rows)
        base = None if before.base is None else _rows(before.base, rows)
        asked = self.asked(self.layout.vision, self.layout.valid)
        asked = _rows(self._at_base(asked, before), rows)
        count = int(asked.sum(dim=1).max())
        text = marked_places(asked, count) if count else None
        sentence = self._sentence(index, hidden, rotary, before, rows, place, text, asked)
        queries: Callable[[int | None], Tensor] = lambda _: sentence.queries(place)  # noqa: E731
        size = None if before.size is None else _rows(before.size, rows).gather(1, place)

        def at_start(where: Tensor) -> Tensor:
            """Tokens at these places as they entered layer 0."""
            return take_tokens(embeds, where if base is None else base.gather(1, where))

        def keys(_: int | None) -> Tensor:
            k = sentence.keys
            heads = sentence.queries(place[:, :1]).shape[1]
            picked = (place + sentence.past)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
            return k.gather(2, picked).repeat_interleave(heads // k.shape[1], dim=1)

        return TokenView(
            take_tokens(_rows(hidden, rows), place), queries, keys, scale=sentence.scale, prefix=0, has_cls=False,
            size=size, origin=_rows(self._origin(before), rows).gather(1, place),
            depth=index / self.attachment.depth, text=None if text is None else at_start(text),
            project=lambda _: at_start(place), text_valid=None if text is None else asked.gather(1, text),
            sentence=sentence, stage="decoder",
        )  # fmt: skip

    def _sentence(
        self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch, rows: Tensor | None, place: Tensor,
        text: Tensor | None, asked: Tensor,
    ) -> Sentence:  # fmt: skip
        told: dict[str, Any] = {
            "text": text, "text_valid": None if text is None else asked.gather(1, text),
            "states": lambda where: take_tokens(_rows(hidden, rows), where),
        }  # fmt: skip
        if index not in self._before:  # a cut at layer 0

            def nothing(*_: object) -> Tensor:
                raise OptionError("at=0: no layer comes before it whose attention could be looked at; give at >= 1")

            return Sentence(nothing, nothing, scale=1.0, vision=place, last=place[:, -1], **told)
        _, came, _, _ = self._before[index]
        told["came"] = lambda where: take_tokens(_rows(came, rows), where)
        layer, entered, rotary, cached, past, valid, key_bias = self._ranked_by(index, hidden, rotary, before)
        entered = _rows(entered, rows)
        cos, sin = (part if rows is None or part.shape[0] == 1 else part[rows] for part in rotary)

        def queries(where: Tensor) -> Tensor:
            return layer.sieve_queries(take_tokens(entered, where), *_take_rotary((cos, sin), where))

        length = entered.shape[1]

        def every_key() -> Tensor:
            known = [] if cached is None else [_rows(cached, rows)]
            new = past + length - sum(part.shape[2] for part in known)
            return torch.cat([*known, layer.sieve_keys(entered, cos, sin)], dim=2) if new else known[0]

        keys = _once(every_key)
        if before.valid is None:
            last = torch.full((entered.shape[0],), length - 1, device=entered.device)
        else:
            last = (_rows(before.valid, rows) * torch.arange(length, device=entered.device)).amax(dim=1)
        return Sentence(
            queries, keys, scale=layer.sieve_scale(), vision=place, last=last,
            valid=None if valid is None else _rows(valid, rows), past=past,
            key_bias=None if key_bias is None else _rows(key_bias, rows), softcap=layer.sieve_form.softcap,
            seen=self._sees(layer.sieve_form.window, before, rows, past, length), **told,
        )  # fmt: skip

    def _sees(
        self, window: int | None, before: Stretch, rows: Tensor | None, past: int, length: int
    ) -> Callable[[Tensor], Tensor] | None:
        """places (b, R) -> (b, R, past + L) which keys they see; None where causality alone says it."""
        reach = self._reach(before, window, length)
        if reach is None or self.layout.vision is None:
            return None
        device, batch = self.layout.vision.device, self.layout.vision.shape[0]
        place = torch.arange(self.length, device=device).expand(batch, -1)
        place = place if self.layout.place is None else self.layout.place
        place = _rows(self._at_base(place, before), rows)
        blocks = None if reach.blocks is None else _rows(reach.blocks, rows)
        whole = Reach(reach.window, place, blocks, reach.bounded)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()

        def seen(where: Tensor) -> Tensor:
            new = whole.seen(causal, length).expand(where.shape[0], -1, -1)
            new = new.gather(1, where.unsqueeze(2).expand(-1, -1, length))
            return torch.cat([torch.ones(*new.shape[:2], past, dtype=torch.bool, device=device), new], dim=2)

        return seen

    def _ranked_by(self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch) -> tuple[Any, ...]:
        """The layer whose attention the cut before layer `index` is ranked by: the one before, or the next on all the
        tokens that are still there. Layer, its input, rotation, cached keys (with the new tokens' where it has run),
        how many are of earlier turns, and for all keys which count and what is added to their logits."""
        layer, entered, used, cache = self._before[index]
        assert self.attachment.second is not None
        if not self.attachment.second.reads_next_layer:
            if layer.sieve_form.window is not None:  # its cache lets go of the first keys: the new ones are worked out
                return layer, entered, used, None, 0, before.valid, before.key_bias
            start = max((at for at in (0, *self.attachment.at) if at < index), default=0)
            cached = None if cache is None else cache.layers[index - 1].keys
            past = 0 if cached is None else cached.shape[2] - entered.shape[1]
            return layer, entered, used, cached, past, self.memory.valid.get(start), self.memory.key_bias.get(start)
        following: Any = list(self.attachment.blocks.children())[index]
        if following.sieve_form.window is not None:
            return following, hidden, before.turned(rotary), None, 0, before.valid, before.key_bias
        (batch, here), past = hidden.shape[:2], past_length(cache, index)
        valid = join_keys(self.memory.valid.get(index), before.valid, batch, past, here, hidden, True)
        key_bias = join_keys(self.memory.key_bias.get(index), before.key_bias, batch, past, here, hidden, 0.0)
        cached = cache.layers[index].keys if past else None
        return following, hidden, before.turned(rotary), cached, past, valid, key_bias

    # -- what is noted --------------------------------------------------------------------------------------------

    def _note_all(self, index: int, stretch: Stretch) -> None:
        vision, widest = self._vision(stretch), max(stretch.left, default=0)
        place = marked_places(vision, widest)
        self.kept[index] = self._origin(stretch).gather(1, place).masked_fill(~vision.gather(1, place), -1)

    def _note(self, index: int, before: Stretch, found: list[Found]) -> None:
        """kept: (B, K) numbers of the vision tokens that stay, -1 where a row has fewer; scores on the whole prompt."""
        origin = self._origin(before)
        batch, widest = origin.shape[0], max(kept.shape[1] for _, _, kept, _ in found)
        total = int(self.layout.origin.max()) + 1 if self.layout.origin is not None else 0
        noted = torch.full((batch, widest), -1, dtype=torch.int64, device=origin.device)
        scores = torch.full((batch, total), torch.nan, device=origin.device)
        scored = False
        for members, place, kept, reduction in found:
            rows = torch.tensor(members, device=origin.device)
            noted[rows, : kept.shape[1]] = origin[rows].gather(1, kept)
            if reduction is not None and reduction.scores is not None:
                scores[rows.unsqueeze(1), origin[rows].gather(1, place)] = reduction.scores.detach().float()
                scored = True
        self.kept[index] = noted
        self.reductions[index] = [reduction for *_, reduction in found if reduction is not None]
        if scored:
            self.scores[index] = scores


def _mark(mask: Tensor, rows: Tensor | None, place: Tensor) -> Tensor:
    """mask (B, L) with True at `place` (b, K) of the rows."""
    every = torch.arange(mask.shape[0], device=mask.device) if rows is None else rows
    return mask.index_put((every.unsqueeze(1), place), torch.ones((), dtype=torch.bool, device=mask.device))


def _once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    found: list[Tensor] = []

    def get() -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return get
