"""Views with independent q, k and tokens, and what a referee needs of them in plain numbers."""

from __future__ import annotations

import numpy as np
import torch

from tokensieve.core.view import TokenView


def draw_view(seed, n=9, heads=2, prefix=1, made=0, biased=True, batch=3, d=4, dtype=torch.float32, **rest):
    """A view of random tokens, with sizes and their log as the attention's bias."""
    g = torch.Generator().manual_seed(seed)
    length = prefix + n + made
    tokens = torch.randn(batch, length, heads * d, generator=g).to(dtype)
    q, k = (torch.randn(batch, heads, length, d, generator=g).to(dtype) for _ in range(2))
    size = torch.randint(1, 6, (batch, n + made), generator=g).float()
    bias = torch.cat([torch.zeros(batch, prefix), size.log()], dim=1).to(dtype) if biased else None
    rest = {"has_cls": prefix > 0} | rest
    return TokenView(
        tokens, q, k, scale=0.6, prefix=prefix, made=made, size=size if biased else None, bias=bias, **rest
    )


def one_of(view, b):
    """Image b of a view, alone."""
    text = view.text if view.text is None or view.text.dim() == 2 else view.text[b : b + 1]
    return TokenView(
        view.tokens[b : b + 1],
        view.q[b : b + 1],
        view.k[b : b + 1],
        scale=view.scale,
        prefix=view.prefix,
        has_cls=view.has_cls,
        made=view.made,
        bias=None if view.bias is None else view.bias[b : b + 1],
        depth=view.depth,
        text=text,
    )


def attention_of(view, b):
    """(L, L) attention of image b: softmax over all keys, mean over heads, in float64."""
    q, k = view.q[b].double().numpy(), view.k[b].double().numpy()
    bias = np.zeros(q.shape[1]) if view.bias is None else view.bias[b].double().numpy()
    out = np.zeros((q.shape[1], q.shape[1]))
    for h in range(q.shape[0]):
        for i in range(q.shape[1]):
            e = np.array([np.exp(q[h, i] @ k[h, j] * view.scale + bias[j]) for j in range(q.shape[1])])
            out[i] += e / e.sum() / q.shape[0]
    return out


def importance_of(view, b):
    """CLS row, or the mean of all rows without a CLS: patches, then the extra tokens of earlier cuts."""
    full = attention_of(view, b)
    return list((full[0] if view.has_cls else full.mean(axis=0))[view.prefix :])


def patches_of(view, b):
    return view.tokens[b, view.prefix : view.prefix + view.n].double().numpy()


def keys_of(view, b):
    k = view.k[b, :, view.prefix : view.prefix + view.n].double().numpy()
    return sum(k[h] for h in range(len(k))) / len(k)


def cos(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def best(values, k, among=None):
    """The indices of the k highest, ascending."""
    return sorted(sorted(among if among is not None else range(len(values)), key=lambda i: -values[i])[:k])


def nearest_kept(keys, kept):
    """For each dropped patch, the slot of the kept one with the most similar key."""
    gone = [i for i in range(len(keys)) if i not in kept]
    return gone, [max(range(len(kept)), key=lambda s: cos(keys[i], keys[kept[s]])) for i in gone]
