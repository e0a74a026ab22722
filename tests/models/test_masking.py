"""A drop is the same as hiding tokens: after a cut, every family's blocks give what the untouched model gives when the
dropped tokens' keys are masked with -inf, at their own places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tokensieve
from tokensieve.testing import tiny_model, tiny_models

KEEP = [0, 3, 4, 9, 14, 15, 22, 27, 30, 35]


class Fixed(tokensieve.Method):
    """Keeps these patches of any image."""

    def reduce(self, view: tokensieve.TokenView, keep: int) -> tokensieve.Reduction:
        return tokensieve.Reduction(keep=torch.tensor(KEEP).expand(view.batch, -1))


def hiding(prefix: int) -> Any:
    """scaled_dot_product_attention in which nobody sees the dropped patches of a whole sequence."""
    attention = F.scaled_dot_product_attention

    def hidden(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any) -> Tensor:
        if q.shape[2] != k.shape[2]:  # a pool
            return attention(q, k, v, attn_mask=attn_mask, **rest)
        mask = torch.full((k.shape[2],), -torch.inf)
        mask[:prefix] = 0.0
        mask[torch.tensor(KEEP) + prefix] = 0.0
        if attn_mask is not None:
            given = attn_mask
            if given.dtype == torch.bool:
                given = torch.zeros(given.shape).masked_fill(~given, -torch.inf)
            mask = mask + given
        return attention(q, k, v, attn_mask=mask.expand(1, 1, k.shape[2], -1) if mask.dim() == 1 else mask, **rest)

    return hidden


OTHER_ATTENTION = ("openclip", "torch", "transformers_blip", "transformers_flava")  # they do not call that function


@pytest.mark.parametrize(
    "family", [f for f in tiny_models() if f.startswith("openclip_timm") or not f.startswith(OTHER_ATTENTION)]
)
def test_a_drop_is_masking(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens leave after block 0's attention; from block 1 on the untouched model may not see them."""
    tiny = tiny_model(family)
    images, seen = tiny.images(2), {}

    def note(name: str) -> Any:
        def hook(_: Any, args: Any, out: Any) -> None:
            seen[name] = out[0] if isinstance(out, tuple) else out

        return hook

    with torch.no_grad():
        with tokensieve.attach(tiny.model, Fixed(), keep=len(KEEP), at=0) as handle:
            blocks = list(handle.blocks.children())
            hook = blocks[-1].register_forward_hook(note("reduced"))
            tiny.feature(tiny.model, images)
            hook.remove()
        first = blocks[0].register_forward_hook(
            lambda *_: monkeypatch.setattr(F, "scaled_dot_product_attention", hiding(tiny.prefix))
        )
        last = blocks[-1].register_forward_hook(note("whole"))
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            tiny.feature(tiny.model, images)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
            monkeypatch.undo()
            first.remove()
            last.remove()
    rows = [*range(tiny.prefix), *(k + tiny.prefix for k in KEEP)]
    wanted, got = seen["whole"][:, rows], seen["reduced"]
    if got.shape[1] == tiny.prefix + 36:  # a tower whose output is a map gets it at full size
        got = got[:, rows]
    assert torch.allclose(got, wanted, atol=1e-4 * wanted.abs().max().item()), (got - wanted).abs().max()
