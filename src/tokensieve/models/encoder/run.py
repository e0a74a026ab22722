"""Run transformer blocks with a cut between attention and MLP, without touching a class.

How it works. While attached, the list that holds the blocks and the blocks themselves carry another class (per
instance: `module.__class__`), which is put back on removal. Iterating the list starts a `Run`, the state of one
forward, and yields every block bound to it. So the model's own loop stays in charge (checkpointing, hooks, hidden
states, intermediates), and what passes from block to block (sizes, origins) travels as an argument: nothing is shared
between forwards, threads or replicas, and a checkpointed block is recomputed with the state it had.

Imports core, swap and timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.hooks import warn_of_hooks
from tokensieve.models.encoder.padding import budget, last_origin, padded_cut
from tokensieve.models.grid import grid_of, nearest_kept
from tokensieve.models.swap import calls_its_class
from tokensieve.models.timing import now

if TYPE_CHECKING:
    from tokensieve.models.encoder.handle import EncoderHandle

__all__ = ["Attended", "Run", "SievedBlocks", "State", "fusing_runs", "image_sizes"]


class State(NamedTuple):
    """What enters a block beside the tokens. None stands for "as at the start": one patch each, all of them there."""

    size: Tensor | None = None  # (B, N+M) patches each token stands for
    bias: Tensor | None = None  # (B, P+N+M) on every row of logits: log of the sizes, as far as they count
    origin: Tensor | None = None  # (B, N) index of each patch in the full grid
    made: int = 0  # tokens at the end that are not patches
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

    def __init__(self, attachment: EncoderHandle) -> None:
        self.attachment = attachment
        self.owner: SievedBlocks | None = None  # the list whose last run it becomes with its first block
        self.patches = 0  # at the start; set by the first block
        self.counts: dict[int, int] = {}  # block -> patches after its cut
        self.valid: Tensor | None = None  # (B, N) False for padding; None: there is none
        self.masked = False  # whether the blocks got a mask
        self.states: dict[int, State] = {0: State()}
        self.reductions: dict[int, Reduction] = {}
        self.kept: dict[int, Tensor] = {}
        self.leaving: dict[int, int] = {}  # block -> tokens that leave it
        self.pooled = 0  # tokens that the tower's pooling gets
        self.tail: Tensor | None = None  # what left the last block, only for mode="fuse"
        self.images = 0  # of the batch
        self.seconds: float | None = None  # from the first block to the last, where the handle asks for timing
        self._start = 0.0
        self.image: tuple[int, ...] | None = None  # pixels of the image, where blocks return one token for each patch
        self.extras: dict[int, Tensor] = {}  # then: block -> the extra tokens that enter it

    def call(self, block: nn.Module, last: bool, *args: Any, **kwargs: Any) -> Any:
        """Call one of this forward's blocks."""
        if self.owner is not None:
            self.owner.last, self.owner = self, None
            self.images = args[0].shape[0] if args and isinstance(args[0], Tensor) else 0
            if self.attachment.timing:
                self._start = now(args[0].device)
        index = block.__dict__.get("_sieve_index")
        if index is None:
            out = block(*args, **kwargs)
        elif not calls_its_class(block):
            raise UnsupportedModelError(
                f"block {index} was given a forward of its own after attach, which hides the reduced one: delete it "
                "(del block.forward) and compile with block.compile() instead"
            )
        else:
            if self.attachment.mode == "prune" and not torch.compiler.is_compiling():
                warn_of_hooks(block.__dict__["_sieve_form"], block, index, self.attachment.warned)
            out = block(*args, run=self, **kwargs)
        if last and self._start:
            self.seconds = now(out.device) - self._start
        return out

    def enter(self, block: int, x: Tensor) -> State:
        """The state before `block`, into which x (B, L, D) goes."""
        if not self.leaving and not self.counts:
            self.patches = x.shape[1] - self.attachment.prefix
            self.counts = self.attachment.counts(self.patches)
        return self.states[block]

    def cuts(self, block: int, patches: int) -> bool:
        """Whether some of the `patches` that are left leave at this block."""
        if self.valid is not None and block in self.counts:
            return max(budget(self, self.valid, block)) < patches
        return self.counts.get(block, patches) < patches

    def cut(self, block: int, seen: Attended) -> Tensor:
        """Let the method decide at this block and apply it: (B, L, D) -> (B, L', D)."""
        state = self.states[block]
        if self.valid is not None:
            return self._padded(block, seen, state)
        reduction, origin = self.decide(block, seen)
        out, size = reduction.apply(seen.tokens, self.attachment.prefix, state.made, state.size)
        made = state.made if reduction.extra is None else reduction.extra.shape[1]
        self.states[block + 1] = State(size, self.log_sizes(size), origin, made)
        return out

    def _padded(self, block: int, seen: Attended, state: State) -> Tensor:
        assert self.valid is not None
        if self.attachment.method.differentiable and torch.is_grad_enabled():
            raise UnsupportedModelError("a selection cannot be trained on padded batches: give images of one size")
        with torch.no_grad() if self.attachment.mode != "prune" else nullcontext():
            out = padded_cut(self, block, seen, state, self.valid)
        self.reductions[block], self.kept[block] = out.reduction, out.kept
        self.states[block + 1] = State(out.size, self.log_sizes(out.size), out.origin, out.made)
        return out.tokens

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
        if self.image is not None and self.states[block + 1].origin is not None:
            x = self.widen(block, x)
            self.pooled = x.shape[1]
            return x
        if block < at.depth - 1:
            return x
        if at.masked_pools:
            last_origin.set(self.states[block + 1].origin)
        if at.pools_patches and self.states[block + 1].size is not None:
            x = self.unmerge(x)
        self.pooled = x.shape[1]
        return x

    def widen(self, block: int, x: Tensor) -> Tensor:
        """(B, P+K+M, D) -> (B, P+N, D): each patch gets the token that stands for it; extra tokens are set aside."""
        prefix, origin = self.attachment.prefix, self.states[block + 1].origin
        assert origin is not None
        assert self.image is not None
        slots = self.slots(block)
        if any(self.reductions[b].into is None for b in self.reductions if b <= block):
            grid = grid_of(self.patches, self.attachment.grid, self.image)
            slots = torch.where(slots >= 0, slots, nearest_kept(origin, grid))
        self.extras[block + 1] = x[:, prefix + origin.shape[1] :]
        lead = torch.arange(prefix, device=x.device).expand(x.shape[0], -1)
        return take_tokens(x, torch.cat([lead, slots + prefix], dim=1))

    def narrow(self, block: int, x: Tensor) -> Tensor:
        """What `widen` made of the block before -> the tokens that are left. (B, P+N, D) -> (B, P+K+M, D)"""
        extra = self.extras.get(block)
        if extra is None:
            return x
        prefix, origin = self.attachment.prefix, self.states[block].origin
        assert origin is not None
        lead = torch.arange(prefix, device=x.device).expand(x.shape[0], -1)
        return torch.cat([take_tokens(x, torch.cat([lead, origin + prefix], dim=1)), extra], dim=1)

    def slots(self, last: int | None = None) -> Tensor:
        """(B, N) for each patch of the full grid the slot it ended in, -1 where it was dropped.

        last: the block up to which cuts count. None: all.
        """
        slot: Tensor | None = None
        before = self.patches
        for block in sorted(self.reductions):
            if last is not None and block > last:
                break
            step = self.reductions[block].slots(before)
            if slot is None:
                slot = step
            else:
                slot = torch.where(slot >= 0, step.gather(1, slot.clamp_min(0)), slot)
            before = self.reductions[block].keep.shape[1]
        assert slot is not None
        return slot

    def unmerge(self, x: Tensor) -> Tensor:
        """(B, P+K, D) -> (B, P+N, D): every patch gets the token it was merged into.

        A mean over that is the mean weighted by size, and a key that stands n times is one with log n on its logit: so
        any pooling over patches does the right thing, untouched.
        """
        if any(reduction.into is None or reduction.extra is not None for reduction in self.reductions.values()):
            raise UnsupportedModelError(
                "this tower pools over patches: a method may merge them or drop them, not both, and adds no token "
                "where it merges"
            )
        prefix = self.attachment.prefix
        lead = torch.arange(prefix, device=x.device).expand(x.shape[0], -1)
        return take_tokens(x, torch.cat([lead, self.slots() + prefix], dim=1))


class Bound:
    """A block that knows the run it belongs to. Otherwise it is the block."""

    def __init__(self, block: nn.Module, run: Run, last: bool) -> None:
        self.block, self.run, self.last = block, run, last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.call(self.block, self.last, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)


class SievedBlocks(nn.ModuleList):
    """The list of blocks while attached. Iterating it starts a run. Takes the place of a ModuleList or a Sequential.

    Not a Sequential itself: timm's `checkpoint_seq` would take its children one by one, past the run.
    """

    attachment: EncoderHandle
    last: Run | None

    def bound(self) -> list[Bound]:
        """All blocks, bound to a new run, the last one from when a block is called: looking is not a forward."""
        run = self.attachment.new_run(self.attachment)
        if self.attachment.mode == "fuse":
            fusing_runs.get([]).append(run)
        if not torch.compiler.is_compiling():  # calls that ask for full size are not compiled
            run.image = image_sizes.get()
        if not torch.compiler.is_exporting():
            run.owner = self
        blocks = [block for block in self._modules.values() if block is not None]
        return [Bound(block, run, block is blocks[-1]) for block in blocks]

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
fusing_runs: ContextVar[list[Run]] = ContextVar("fusing_runs")

# Pixels of the image whose features the caller wants in full size; None otherwise. See `dense`.
image_sizes: ContextVar[tuple[int, ...] | None] = ContextVar("image_sizes", default=None)
