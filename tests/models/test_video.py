"""Video encoders: where patches lie in time, and that what repeats from frame to frame leaves first."""

from __future__ import annotations

import pytest
import torch

import tokensieve
from tokensieve.testing import tiny_model

FRAMES, SIDE = 8, 6


def scene() -> tuple[torch.Tensor, torch.Tensor]:
    """A patch-sized square of new noise in each frame goes over noise that stands still.

    Returns the clip (1, T, 3, 48, 48) and which patches (T * 36,) move.
    """
    generator = torch.Generator().manual_seed(0)
    ground = torch.randn(3, 48, 48, generator=generator)
    clip, moves = ground.expand(FRAMES, -1, -1, -1).clone(), torch.zeros(FRAMES, SIDE, SIDE, dtype=torch.bool)
    for t in range(FRAMES):
        column = t % (SIDE - 1)
        clip[t, :, 16:32, 8 * column : 8 * column + 16] = 2.0 * torch.randn(3, 16, 16, generator=generator)
        moves[t, 2:4, column : column + 2] = True
    return clip.unsqueeze(0), moves.flatten()


def video_model() -> torch.nn.Module:
    """VideoMAE's own class, random, whose patches say more than their places do."""
    from transformers import VideoMAEConfig, VideoMAEModel

    torch.manual_seed(0)
    config = VideoMAEConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=48, patch_size=8,
        num_frames=FRAMES, tubelet_size=1, use_mean_pooling=False,
    )  # fmt: skip
    model = VideoMAEModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn_like(p) * (p.numel() / p.shape[0]) ** -0.5)
        model.embeddings.position_embeddings.mul_(0.1)
    return model


@pytest.mark.parametrize("family", ["transformers_videomae", "transformers_vjepa2"])
def test_places_say_frame_row_and_column(family: str) -> None:
    tiny = tiny_model(family)
    with torch.no_grad(), tokensieve.attach(tiny.model, "random", keep=9, at=1) as handle:
        tiny.feature(tiny.model, tiny.images(2))
        assert handle.grid == (4, 3, 3)
        assert handle.patches == 36
        wanted = [[(i // 9, i // 3 % 3, i % 3) for i in row] for row in handle.kept[1].tolist()]
        assert [[tuple(place) for place in row] for row in handle.places[1].tolist()] == wanted


@pytest.mark.parametrize("method", ["sieve", "tome"])
def test_a_still_background_leaves_first_and_merges_across_frames(method: str) -> None:
    model, (clip, moves) = video_model(), scene()
    with torch.no_grad(), tokensieve.attach(model, method, keep=0.6, at=[0, 1]) as handle:
        model(pixel_values=clip)
        kept = torch.zeros(FRAMES * SIDE * SIDE, dtype=torch.bool)
        kept[handle.kept[1][0]] = True
        assert kept[moves].float().mean() > kept[~moves].float().mean() + 0.2
        slots = handle.blocks.__dict__["last"].slots()[0]
    frame = torch.arange(FRAMES * SIDE * SIDE) // (SIDE * SIDE)
    gone = ~kept
    goal = frame[kept.nonzero().squeeze(1)][slots[gone]]
    assert (goal != frame[gone]).float().mean() > 0.5, "most go into a patch of another frame"
