"""What a method may look at: the tokens of one layer and, only if asked for, what that layer's attention says of them.

Imports score and sentence. Adapters build it; methods read it; tests build it by hand with `TokenView.of`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from tokensieve.core.prompt import Sentence
from tokensieve.core.score import attention_columns, attention_log_sum, attention_received, query_attention

__all__ = ["Rows", "TokenView"]

Rows = Callable[[int | None], Tensor]  # of one token (B, H, 1, d), or of all with None (B, H, P+N+M, d)


def _once(compute: Callable[[TokenView], Tensor]) -> Callable[[TokenView], Tensor]:
    """Keep what was computed. Not functools.cached_property: its lock breaks a graph of torch.compile."""
    name = compute.__name__

    @wraps(compute)
    def get(view: TokenView) -> Tensor:
        if name not in view._seen:
            view._seen[name] = compute(view)
        return view._seen[name]

    return get


class TokenView:
    """The tokens at one cut: P prefix tokens (CLS first, then registers), N patches, M extra tokens of earlier cuts.

    Everything is computed when it is asked for and not before. `cls_attention` and its like include the layer's own
    bias (log-size after merging): they are what the layer really did.
    """

    def __init__(
        self,
        tokens: Tensor,
        q: Tensor | Rows,
        k: Tensor | Rows,
        *,
        scale: float,
        prefix: int,
        has_cls: bool,
        made: int = 0,
        size: Tensor | None = None,
        bias: Tensor | None = None,
        log_sum: Tensor | None = None,
        origin: Tensor | None = None,
        depth: float = 0.0,
        text: Tensor | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
        text_valid: Tensor | None = None,
        sentence: Sentence | None = None,
        stage: str = "encoder",
    ) -> None:
        """tokens: (B, P+N+M, D), the residual stream after attention, before the second norm.

        q, k: (B, H, P+N+M, d) per head, norms and rotations applied; or functions that work them out when asked for.
        bias: (B, P+N+M), added to every row of logits; or (1 or B, 1 or H, 1 or P+N+M, P+N+M), added to all of them.
        log_sum: (B, H, P+N+M), each row's log-sum-exp as the fused kernel left it; computed if absent.
        size: (B, N+M) patches each token stands for. origin: (B, N) index of each patch in the full grid.
        depth: this block's place in the encoder, 0 for the first, towards 1 for the last.
        text: (T, E) or (B, T, E) features in the joint space, into which `project` takes patches.
        text_valid: (B, T), False where an image's text is shorter. sentence: inside a language model, what stands
        around the patches. stage: where the cut is, one of `methods.base.STAGES`.
        """
        self.tokens, self._q, self._k = tokens, q, k
        self.text_valid, self.sentence, self.stage = text_valid, sentence, stage
        self.scale, self.prefix, self.has_cls, self.made = scale, prefix, has_cls, made
        self.bias, self.depth, self.text = bias, depth, text
        self._size, self._log_sum, self._origin, self._project = size, log_sum, origin, project
        self._seen: dict[str, Tensor] = {}

    @classmethod
    def of(cls, tokens: Tensor, heads: int = 1, prefix: int = 1, has_cls: bool = True, **rest: object) -> TokenView:
        """A view of bare features (B, P+N, D): they stand in for the queries and keys as well."""
        batch, length, width = tokens.shape
        split = tokens.view(batch, length, heads, width // heads).transpose(1, 2)
        scale = (width // heads) ** -0.5
        return cls(tokens, split, split, scale=scale, prefix=prefix, has_cls=has_cls, **rest)  # type: ignore[arg-type]

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def n(self) -> int:
        """How many patches are left."""
        return self.tokens.shape[1] - self.prefix - self.made

    @property
    def x(self) -> Tensor:
        """(B, N, D) residual stream of the patches."""
        return self.tokens[:, self.prefix : self.prefix + self.n]

    @property
    def q(self) -> Tensor:
        """(B, H, P+N+M, d) queries."""
        if not isinstance(self._q, Tensor):
            self._q = self._q(None)
        return self._q

    @property
    def k(self) -> Tensor:
        """(B, H, P+N+M, d) keys."""
        if not isinstance(self._k, Tensor):
            self._k = self._k(None)
        return self._k

    @property
    @_once
    def keys(self) -> Tensor:
        """(B, N, d) keys of the patches, averaged over heads: the similarity space of ToMe."""
        return self.k.mean(dim=1)[:, self.prefix : self.prefix + self.n]

    @property
    def size(self) -> Tensor:
        """(B, N) patches that each one stands for; ones until something was merged."""
        if self._size is None:
            return torch.ones(self.batch, self.n, device=self.tokens.device)
        return self._size[:, : self.n]

    @property
    def origin(self) -> Tensor:
        """(B, N) index of each patch in the full grid."""
        if self._origin is None:
            return torch.arange(self.n, device=self.tokens.device).expand(self.batch, -1)
        return self._origin

    @property
    @_once
    def log_sum(self) -> Tensor:
        """(B, H, P+N+M) log of each attention row's denominator."""
        if self._log_sum is not None:
            return self._log_sum
        return attention_log_sum(self.q, self.k, self.scale, self.bias)

    @property
    @_once
    def _cls_row(self) -> Tensor:
        first = self._q[:, :, 0] if isinstance(self._q, Tensor) else self._q(0)[:, :, 0]
        bias = self.bias if self.bias is None or self.bias.dim() == 2 else self.bias[:, :, 0]
        return query_attention(first, self.k, self.scale, bias)[:, self.prefix :]

    def cls_attention(self, made: bool = False) -> Tensor:
        """(B, N) attention that CLS pays to each patch, mean over heads; (B, N+M) with `made`. One row, not a map."""
        if not self.has_cls:
            raise TypeError("this tower has no CLS token: use view.importance()")
        return self._cls_row if made else self._cls_row[:, : self.n]

    @property
    @_once
    def _received(self) -> Tensor:
        return attention_received(self.q, self.k, self.scale, self.bias, self._log_sum)[:, self.prefix :]

    def importance(self, made: bool = False) -> Tensor:
        """CLS attention where there is a CLS, the mean attention received where there is none. Shapes as above.

        Inside a language model: the attention of the prompt's last token.
        """
        if self.has_cls:
            return self.cls_attention(made)
        if self.sentence is not None:
            return self.attention_from_last()
        return self._received if made else self._received[:, : self.n]

    @property
    @_once
    def _last_row(self) -> Tensor:
        assert self.sentence is not None
        return self.sentence.attention(self.sentence.last.unsqueeze(1)).squeeze(1)

    def attention_from_last(self) -> Tensor:
        """(B, N) attention that the prompt's last token paid to each patch in the layer before; mean over heads."""
        if self.sentence is None:
            raise TypeError("attention_from_last: these patches stand in no language model's sequence")
        return self._last_row

    def attention_from_text(self) -> Tensor:
        """(B, T, N) attention that each token of the text paid to each patch; rows of absent tokens are 0."""
        if self.sentence is None or self.sentence.text is None:
            raise TypeError("attention_from_text: these patches stand in no sequence with a text")
        rows = self.sentence.attention(self.sentence.text)
        # not a product: an absent token's row may see nothing, and be not a number
        return rows if self.text_valid is None else rows.masked_fill(~self.text_valid.unsqueeze(-1), 0.0)

    def attention_to(self, j: Tensor) -> Tensor:
        """(B, N, J) attention of every patch to the patches j (B, J): softmax over all keys, mean over heads.

        Exact without an N x N map: each row's denominator comes from the fused kernel.
        """
        return self._columns(j).mean(dim=1).transpose(1, 2)

    def mean_attention_to(self, j: Tensor) -> Tensor:
        """(B, N) the mean of `attention_to` over the patches j: heads and patches in one pass."""
        return self._columns(j).flatten(1, 2).mean(dim=1)

    def _columns(self, j: Tensor) -> Tensor:
        p, end = self.prefix, self.prefix + self.n
        columns = self.k[:, :, p:end]
        bias = self.bias
        if bias is not None:
            bias = bias[..., p:end] if bias.dim() == 2 or bias.shape[2] == 1 else bias[:, :, p:end, p:end]
        return attention_columns(self.q[:, :, p:end], columns, j, self.scale, bias, self.log_sum[:, :, p:end])

    @property
    @_once
    def joint(self) -> Tensor:
        """(B, N, E) patches in the space that `text` lives in."""
        return self.x if self._project is None else self._project(self.x)
