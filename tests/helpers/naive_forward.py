"""A forward of open_clip's and timm's ViT of its own: explicit softmax attention, one image at a time, cuts by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# a cut: (tokens (L, D), q, k (H, L, d), sizes (L,), log-size bias (L,)) of one image -> tokens, sizes
Cut = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_rows(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """(H, L, d) -> (H, L, L)"""
    logits = torch.einsum("hid,hjd->hij", q, k) / q.shape[-1] ** 0.5 + bias
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    return weight / weight.sum(-1, keepdim=True)


def drop(chosen: Callable[[Tensor, Tensor, Tensor], list[int]]) -> Cut:
    """Keep CLS and the patches that `chosen` names; nothing else happens."""

    def cut(x: Tensor, q: Tensor, k: Tensor, size: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows = [0] + [1 + i for i in chosen(q, k, bias)]
        return x[rows], size[rows]

    return cut


def fold(chosen: Callable[[Tensor, Tensor, Tensor], list[int]]) -> Cut:
    """As `drop`, but every other patch is averaged into the kept one whose mean key is most like its own."""

    def cut(x: Tensor, q: Tensor, k: Tensor, size: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        kept, keys = chosen(q, k, bias), k.mean(0)
        groups = {i: [i] for i in kept}
        for j in range(len(x) - 1):
            if j not in groups:
                alike = [torch.cosine_similarity(keys[1 + j], keys[1 + i], dim=0).item() for i in kept]
                groups[kept[alike.index(max(alike))]].append(j)
        return merged(x, size, [groups[i] for i in kept])

    return cut


def merged(x: Tensor, size: Tensor, groups: list[list[int]]) -> tuple[Tensor, Tensor]:
    tokens, sizes = [x[0]], [size[0]]
    for group in groups:
        total = sum(size[1 + i] for i in group)
        tokens.append(sum(x[1 + i] * size[1 + i] for i in group) / total)
        sizes.append(total)
    return torch.stack(tokens), torch.stack(sizes)


def tome(r: int) -> Cut:
    """CLS stands at position 0: even positions are A, odd ones B, so patches 1, 3, ... can go into patches 0, 2, ..."""

    def cut(x: Tensor, q: Tensor, k: Tensor, size: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        n, keys = len(x) - 1, k.mean(0)[1:]
        best = []
        for a in range(1, n, 2):
            alike = [(torch.cosine_similarity(keys[a], keys[b], dim=0).item(), b) for b in range(0, n, 2)]
            best.append((*max(alike), a))
        gone = {a: b for _, b, a in sorted(best, reverse=True)[:r]}
        groups = {i: [i] for i in range(n) if i not in gone}
        for a, b in gone.items():
            groups[b].append(a)
        return merged(x, size, [groups[i] for i in sorted(groups)])

    return cut


def one_more(keep: int) -> Cut:
    """The others become one token at the end, weighted by what CLS pays them."""

    def cut(x: Tensor, q: Tensor, k: Tensor, size: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        kept = by_cls(keep)(q, k, bias)
        paid = softmax_rows(q, k, bias)[:, 0, 1:].mean(0)
        rest = [i for i in range(len(x) - 1) if i not in kept]
        token = sum(paid[i] * x[1 + i] for i in rest) / sum(paid[i] for i in rest)
        return torch.cat([x[[0] + [1 + i for i in kept]], token[None]]), torch.ones(2 + keep)

    return cut


def evit(keep: int) -> Cut:
    """One of the `keep` is the others' sum, each times what CLS pays it, in the place of the best of them."""

    def cut(x: Tensor, q: Tensor, k: Tensor, size: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        kept = by_cls(keep)(q, k, bias)
        paid = softmax_rows(q, k, bias)[:, 0, 1:].mean(0)
        place = min(kept, key=lambda i: paid[i])
        rest = [i for i in range(len(x) - 1) if i not in kept or i == place]
        total = sum(paid[i] * x[1 + i] for i in rest)
        return torch.stack([x[0], *(total if i == place else x[1 + i] for i in kept)]), torch.ones(1 + keep)

    return cut


def by_cls(keep: int) -> Callable[[Tensor, Tensor, Tensor], list[int]]:
    """The patches that CLS attends to most."""

    def chosen(q: Tensor, k: Tensor, bias: Tensor) -> list[int]:
        paid = softmax_rows(q, k, bias)[:, 0, 1:].mean(0).tolist()
        return sorted(sorted(range(len(paid)), key=lambda i: -paid[i])[:keep])

    return chosen


def blocks_by_hand(blocks: nn.ModuleList, tokens: Tensor, cuts: dict[int, Cut]) -> list[tuple[Tensor, Tensor]]:
    """For each image its tokens after the last block and their sizes."""
    out = []
    for x in tokens:
        size = torch.ones(len(x))
        for index, block in enumerate(blocks.children()):
            x, size = block_by_hand(block, x, size, cuts.get(index))
        out.append((x, size))
    return out


def block_by_hand(block: nn.Module, x: Tensor, size: Tensor, cut: Cut | None) -> tuple[Tensor, Tensor]:
    timm = hasattr(block.attn, "qkv")
    weight, offset = (
        (block.attn.qkv.weight, block.attn.qkv.bias) if timm else (block.attn.in_proj_weight, block.attn.in_proj_bias)
    )
    norm1, norm2 = (block.norm1, block.norm2) if timm else (block.ln_1, block.ln_2)
    scale1, scale2 = (block.ls1, block.ls2) if timm else (block.ls_1, block.ls_2)
    project = block.attn.proj if timm else block.attn.out_proj
    heads, width = block.attn.num_heads, x.shape[1]
    q, k, v = (norm1(x) @ part.T + b for part, b in zip(weight.chunk(3), offset.chunk(3), strict=True))
    q, k, v = (t.view(-1, heads, width // heads).transpose(0, 1) for t in (q, k, v))
    bias = size.log()
    attended = (softmax_rows(q, k, bias) @ v).transpose(0, 1).reshape(-1, width)
    x = x + scale1(project(attended))
    if cut is not None:
        x, size = cut(x, q, k, size, bias)
    return x + scale2(block.mlp(norm2(x))), size


def embed(model: nn.Module, images: Tensor) -> Tensor:
    """Tokens as they enter the first block."""
    if hasattr(model, "patch_embed"):
        return model.norm_pre(model._pos_embed(model.patch_embed(images)))
    return model._embeds(images)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.transformer.resblocks


def cls_feature(model: nn.Module, x: Tensor) -> Tensor:
    """CLS of one image's tokens through the last norm and the projection."""
    if hasattr(model, "blocks"):
        return model.head(model.norm(x)[0])
    return model.ln_post(x)[0] @ model.proj


def mean_feature(model: nn.Module, x: Tensor, size: Tensor) -> Tensor:
    """The mean of one image's patches, each counted as often as it stands for a patch."""
    mean = (x[1:] * size[1:, None]).sum(0) / size[1:].sum()
    return model.head(model.fc_norm(mean)) if hasattr(model, "blocks") else model.ln_post(mean) @ model.proj
