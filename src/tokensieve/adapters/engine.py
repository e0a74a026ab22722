"""Run transformer blocks with a cut between attention and MLP, without touching a class.

How it works. While attached, the list that holds the blocks and the blocks themselves carry another class (per
instance: `module.__class__`), which is put back on removal. Iterating the list starts a `Run`, the state of one
forward, and yields every block bound to it. So the model's own loop stays in charge (checkpointing, hooks, hidden
states, intermediates), and what passes from block to block (sizes, origins) travels as an argument: nothing is shared
between forwards, threads or replicas, and a checkpointed block is recomputed with the state it had.

Imports core only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokensieve.adapters.attach import Attachment

__all__ = ["Attended", "FusingTower", "Run", "SievedBlock", "SievedBlocks", "State", "attend", "sieved_class"]


class State(NamedTuple):
    """What enters a block beside the tokens. None stands for "as at the start": one patch each, all of them there."""

    size: Tensor | None = None  # (B, N+M) patches each token stands for
    bias: Tensor | None = None  # (B, P+N+M) on every row of logits: log of the sizes, as far as they count
    origin: Tensor | None = None  # (B, N) index of each patch in the full grid
    made: int = 0  # tokens at the end that are no patches
    exists: Tensor | None = None  # (B, N+M) 0 to 1, how far each token is there; only while a selection is trained


class Attended(NamedTuple):
    """What the attention of a block leaves behind, and a cut is decided by."""

    tokens: Tensor  # (B, L, D) the residual stream
    q: Tensor  # (B, H, L, d)
    k: Tensor
    scale: float  # of the logits
    bias: Tensor | None = None  # (B, L) on every row of logits
    log_sum: Tensor | None = None  # (B, H, L) of each row


class Run:
    """One forward: the state before each block, and what was decided at the cuts. Never reused."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.owner: SievedBlocks | None = None  # the list whose last run it becomes with its first block
        self.patches = 0  # at the start; set by the first block
        self.counts: dict[int, int] = {}  # block -> patches after its cut
        self.states: dict[int, State] = {0: State()}
        self.reductions: dict[int, Reduction] = {}
        self.kept: dict[int, Tensor] = {}
        self.leaving: dict[int, int] = {}  # block -> tokens that leave it
        self.pooled = 0  # tokens that the tower's pooling gets
        self.tail: Tensor | None = None  # what left the last block, only for mode="fuse"

    def enter(self, block: int, x: Tensor) -> State:
        """The state before `block`, into which x (B, L, D) goes."""
        if not self.leaving and not self.counts:
            self.patches = x.shape[1] - self.attachment.prefix
            self.counts = self.attachment.counts(self.patches)
        return self.states[block]

    def cut(self, block: int, seen: Attended) -> Tensor:
        """Let the method decide at this block and apply it: (B, L, D) -> (B, L', D)."""
        state = self.states[block]
        reduction, origin = self.decide(block, seen)
        out, size = reduction.apply(seen.tokens, self.attachment.prefix, state.made, state.size)
        made = state.made if reduction.extra is None else reduction.extra.shape[1]
        self.states[block + 1] = State(size, self.log_sizes(size), origin, made)
        return out

    def decide(self, block: int, seen: Attended) -> tuple[Reduction, Tensor]:
        """Ask the method, and note what it says."""
        method, state = self.attachment.method, self.states.get(block, State())
        learns = method.differentiable and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            view = self.view(block, state, seen)
            reduction = method.reduce(view, self.counts[block])
            origin = view.origin.gather(1, reduction.keep)  # also says so where an index is none
        self.reductions[block] = reduction.detached() if learns else reduction  # no graph outlives its forward
        self.kept[block] = origin
        return reduction, origin

    def view(self, block: int, state: State, seen: Attended) -> TokenView:
        """What the method may look at."""
        at = self.attachment
        return TokenView(
            seen.tokens, seen.q, seen.k, scale=seen.scale, prefix=at.prefix, has_cls=at.has_cls, made=state.made,
            size=state.size, bias=seen.bias, log_sum=seen.log_sum, origin=state.origin, depth=block / at.depth,
            text=at.text, project=at.project,
        )  # fmt: skip

    def log_sizes(self, size: Tensor | None) -> Tensor | None:
        """(B, P+N+M) log of the sizes (B, N+M), as far as they count; 0 for the prefix."""
        weight, prefix = float(self.attachment.method.proportional), self.attachment.prefix
        if size is None or not weight:
            return None
        return F.pad(size.log() * weight, (prefix, 0))

    def bias(self, state: State) -> Tensor | None:
        """(B, P+N+M) what is added to every row of logits in a block with this state."""
        return state.bias

    def leave(self, block: int, x: Tensor) -> Tensor:
        """Note what leaves `block`. After the last one, give merged patches back to a tower that pools over patches."""
        self.leaving[block] = x.shape[1]
        at = self.attachment
        if block < at.depth - 1:
            return x
        if at.pools_patches and self.states[block + 1].size is not None:
            x = self.unmerge(x)
        self.pooled = x.shape[1]
        return x

    def slots(self) -> Tensor:
        """(B, N) for each patch of the full grid the slot it ended in, -1 where it was dropped."""
        slot: Tensor | None = None
        before = self.patches
        for block in sorted(self.reductions):
            step = self.reductions[block].slots(before)
            if slot is None:
                slot = step
            else:
                slot = torch.where(slot >= 0, step.gather(1, slot.clamp_min(0)), slot)
            before = self.reductions[block].keep.shape[1]
        assert slot is not None
        return slot

    def unmerge(self, x: Tensor) -> Tensor:
        """(B, P+K+M, D) -> (B, P+N+M, D): every patch gets the token it was merged into.

        A mean over that is the mean weighted by size, and a key that stands n times is one with log n on its logit: so
        any pooling over patches does the right thing, untouched.
        """
        if any(reduction.into is None for reduction in self.reductions.values()):
            raise UnsupportedModelError("this tower pools over patches: a method may merge them or drop them, not both")
        prefix = self.attachment.prefix
        lead = torch.arange(prefix, device=x.device).expand(x.shape[0], -1)
        made = self.states[self.attachment.depth].made
        tail = torch.arange(x.shape[1] - made, x.shape[1], device=x.device).expand(x.shape[0], -1)
        return take_tokens(x, torch.cat([lead, self.slots() + prefix, tail], dim=1))


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float, log_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """Fused attention of (B, H, L, d); with `log_sum` also each row's log-sum-exp (B, H, L), where the kernel has it.

    On CPU that is the kernel which scaled_dot_product_attention takes anyway, called by its name. Elsewhere, in
    training with dropout and in export it is None, and a view that needs it computes it.
    """
    mask = None if bias is None else bias.view(-1, 1, 1, bias.shape[1])
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if log_sum and dropout == 0.0 and q.device.type == "cpu" and not torch.compiler.is_exporting():
        if mask is not None:
            mask = mask.expand(-1, q.shape[1], q.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = kernel(q, k, v, dropout, False, attn_mask=mask, scale=scale)
        return out, sums
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale), None


class SievedBlock:
    """Mixin that puts a cut into a block. A family says how its parts are called; modifications against upstream:
    fused attention always, log-size bias after merging, tokens leave between attention and MLP."""

    _sieve_index: int

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        """First norm and projections of the block input (B, L, D): q, k, v (B, H, L, d) and the logit scale."""
        raise TypeError(f"{type(self).__name__} does not say how it projects")

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        """Block input (B, L, D) and heads' output (B, L, H * d) -> the residual stream after attention."""
        raise TypeError(f"{type(self).__name__} does not say what follows attention")

    def sieve_mlp(self, x: Tensor) -> Tensor:
        """Residual stream at the cut -> the block's output."""
        raise TypeError(f"{type(self).__name__} does not say what its MLP is")

    def sieve_dropout(self) -> float:
        """Attention dropout in force now."""
        return 0.0

    def forward(self, x: Tensor, *args: Any, run: Run | None = None, **kwargs: Any) -> Tensor:
        if run is None:
            raise UnsupportedModelError(
                "a block of a reduced encoder was called by itself: call the encoder, or remove the attachment first"
            )
        if run.attachment.mode == "prune":
            return self._sieve_step(x, run, *args, **kwargs)
        out = cast(nn.Module, super()).forward(x, *args, **kwargs)
        return self._sieve_look(x, out, run, *args, **kwargs)

    def sieve_attend(self, x: Tensor, run: Run, state: State, *args: Any, **kwargs: Any) -> Attended:
        """The first half of the block, for its input (B, L, D)."""
        q, k, v, scale = self.sieve_qkv(x, state, *args, **kwargs)
        bias = run.bias(state)
        reads = run.attachment.method.needs_log_sum and self._sieve_index in run.counts
        out, sums = attend(q, k, v, bias, scale, self.sieve_dropout(), reads)
        tokens = self.sieve_attended(x, out.transpose(1, 2).flatten(2))
        return Attended(tokens, q, k, scale, bias, sums)

    def _sieve_step(self, x: Tensor, run: Run, *args: Any, **kwargs: Any) -> Tensor:
        index = self._sieve_index
        state = run.enter(index, x)
        seen = self.sieve_attend(x, run, state, *args, **kwargs)
        tokens = seen.tokens
        here = tokens.shape[1] - run.attachment.prefix - state.made
        if run.counts.get(index, here) < here:
            tokens = run.cut(index, seen)
        else:
            run.states[index + 1] = state
        del seen  # or the MLP's peak comes on top of queries and keys
        return run.leave(index, self.sieve_mlp(tokens))

    def _sieve_look(self, x: Tensor, out: Tensor, run: Run, *args: Any, **kwargs: Any) -> Tensor:
        """Modes that only look: the block ran as it is; the selection is worked out beside it."""
        index = self._sieve_index
        run.states[index] = State()
        state = run.enter(index, x)
        if index in run.counts:
            with torch.no_grad():
                run.decide(index, self.sieve_attend(x, run, state, *args, **kwargs))
        run.leaving[index] = x.shape[1]
        if run.attachment.mode == "fuse" and index == run.attachment.depth - 1:
            run.tail = out
        return out


class Bound:
    """A block that knows the run it belongs to. Otherwise it is the block."""

    def __init__(self, block: nn.Module, run: Run) -> None:
        self.block, self.run = block, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if run.owner is not None:
            run.owner.last, run.owner = run, None
        if isinstance(self.block, SievedBlock):
            return self.block(*args, run=run, **kwargs)
        return self.block(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class SievedBlocks(nn.ModuleList):
    """The list of blocks while attached. Iterating it starts a run. Takes the place of a ModuleList or a Sequential.

    Not a Sequential itself: timm's `checkpoint_seq` would take its children one by one, past the run.
    """

    attachment: Attachment
    last: Run | None

    def bound(self) -> list[Bound]:
        """All blocks, bound to a new run, which becomes the last one when a block is called: looking is no forward."""
        run = self.attachment.new_run(self.attachment)
        if self.attachment.mode == "fuse":
            _fusing.get([]).append(run)
        if not torch.compiler.is_exporting():
            run.owner = self
        blocks = [block for block in self._modules.values() if block is not None]
        return [Bound(block, run) for block in blocks]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.bound())

    def __getitem__(self, index: Any) -> Any:
        blocks = list(self._modules.values())
        return self.bound()[index] if isinstance(index, slice) else blocks[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.bound():
            x = block(x)
        return x


# How a fusing tower gets hold of the run of its own forward, in its own thread. Only mode="fuse" reads it:
# torch.compile breaks its graph here.
_fusing: ContextVar[list[Run]] = ContextVar("_fusing")


class FusingTower:
    """Mixin for mode="fuse": feature = (1 - w) * cls + w * the selected patches, both sides of unit length.

    The patches go through the same last norm and projection as CLS; their weights are the softmax of their scores.
    """

    _sieve_attachment: Attachment

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runs: list[Run] = []
        token = _fusing.set(runs)
        try:
            out = cast(nn.Module, super()).forward(*args, **kwargs)
        finally:
            _fusing.reset(token)
        (run,) = runs
        at, chosen = run.attachment, run.reductions[max(run.reductions)]
        assert run.tail is not None
        tail, run.tail = run.tail, None
        # built from this module and not taken from the attachment: a replica has weights of its own
        project = at.family.feature_projector(cast(nn.Module, self))
        patches = project(take_tokens(tail, chosen.keep + at.prefix))
        if chosen.scores is None:
            weight = torch.full(chosen.keep.shape, 1.0 / chosen.keep.shape[1], device=patches.device)
        else:
            weight = chosen.scores.gather(1, chosen.keep).softmax(dim=1)
        pooled = (patches * weight.unsqueeze(-1).to(patches.dtype)).sum(dim=1)
        feature = out[0] if isinstance(out, tuple) else out
        w = at.fuse_weight
        fused = (1.0 - w) * F.normalize(feature, dim=-1) + w * F.normalize(pooled, dim=-1)
        return (fused, *out[1:]) if isinstance(out, tuple) else fused


_classes: dict[tuple[type, type], Any] = {}


def sieved_class(mixin: type, base: type) -> Any:
    """`base` with `mixin` in front. One class a pair, so that equal models have equal types."""
    parts = (mixin, base)
    if parts not in _classes:
        _classes[parts] = type(f"Sieved{base.__name__}", parts, {"__reduce_ex__": _reduce, "_sieve_parts": parts})
    return _classes[parts]


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle and copy: the class is made on the fly, so it is named by its two parts."""
    return _revive, type(module)._sieve_parts, module.__dict__.copy()


def _revive(mixin: type, base: type) -> Any:
    cls = sieved_class(mixin, base)
    return cls.__new__(cls)
