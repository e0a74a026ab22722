"""The alignment: its loss against a loop, its result on features whose answer is known, its shards."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.together import Towers
from tokensieve.errors import OptionError
from tokensieve.tasks.clip import align
from tokensieve.tasks.clip.webdata import write_webdataset


def test_loss_against_a_loop():
    g = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(5, 4, generator=g), dim=-1) for _ in range(2))
    owner = torch.tensor([0, 1, 0, 2, 1])
    loss = align.contrastive_loss(image, text, owner, torch.tensor(7.0)).item()
    total = 0.0
    for rows, columns in ((image, text), (text, image)):
        for i in range(5):
            logits = [7.0 * float(rows[i] @ columns[j]) for j in range(5)]
            log_sum = math.log(sum(math.exp(v) for v in logits))
            mates = [j for j in range(5) if owner[j] == owner[i]]
            total += -sum(logits[j] - log_sum for j in mates) / len(mates) / 5
    assert loss == pytest.approx(total / 2, rel=1e-5)


def test_separable_features_are_learned_and_the_result_repeats():
    g = torch.Generator().manual_seed(1)
    centres, words = torch.randn(4, 12, generator=g), torch.randn(4, 8, generator=g)
    owner = torch.arange(400) % 4
    features = centres[owner] + 0.3 * torch.randn(400, 12, generator=g)
    text_owner = torch.arange(12) % 4
    text = words[text_owner] + 0.1 * torch.randn(12, 8, generator=g)
    config = align.AlignConfig(images=400, epochs=5, batch_size=64, lr=1e-2)
    data = features, owner, text, text_owner
    first, second = (align.fit_projections(align.AlignTask(Towers(), *data, config)) for _ in range(2))
    assert first.held_out_accuracy > 0.95
    assert set(first.state) == {"visual.proj", "text.proj.weight", "logit_scale"}
    assert all(torch.equal(first.state[k], second.state[k]) for k in first.state)
    seeded = align.AlignConfig(images=400, epochs=5, seed=1)
    other = align.fit_projections(align.AlignTask(Towers(), *data, seeded))
    assert not torch.equal(other.state["visual.proj"], first.state["visual.proj"])


def test_captions_belong_to_their_classes():
    texts, owner = align.captions()
    assert len(texts) == len(set(texts)) == len(owner)
    assert texts[0] == "a photo of a airplane."
    assert {int(o) for o in owner} == set(range(10))


def test_shards_are_kept_and_named_by_their_images(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSIEVE_CACHE", str(tmp_path))
    monkeypatch.setattr(align, "SHARD", 4)
    calls = []

    def encode(images, tower, batch=32):
        calls.append(len(images))
        return torch.from_numpy(images.reshape(len(images), -1)[:, :3].astype(np.float32))

    monkeypatch.setattr(align, "_encode", encode)
    images = np.random.default_rng(0).integers(0, 256, (10, 2, 2, 3), dtype=np.uint8)
    done = []
    first = align.tower_features(images, nn.Identity(), "t", done.append)
    assert (calls, done) == ([4, 4, 2], [4, 4, 2])
    assert torch.equal(first, torch.from_numpy(images.reshape(10, -1)[:, :3].astype(np.float32)))
    assert torch.equal(align.tower_features(images, nn.Identity(), "t"), first)
    assert calls == [4, 4, 2]
    align.tower_features(images[::-1], nn.Identity(), "t")
    assert len(calls) == 6
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize(("field", "value"), [("images", 5), ("held_out", 0.0), ("epochs", 0), ("lr", 0.0)])
def test_wrong_settings_are_named(field, value):
    with pytest.raises(OptionError, match=field):
        align.AlignConfig(**{field: value})


def test_webdataset_is_whole_and_never_overwritten(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    images = np.random.default_rng(0).integers(0, 256, (7, 5, 6, 3), dtype=np.uint8)
    write_webdataset(tmp_path, "test", images, list(range(7)), ["a", "b"], ["a {c}"], per_shard=3)
    assert (tmp_path / "test" / "nshards.txt").read_text() == "3\n"
    shards = [str(tmp_path / "test" / f"{i}.tar") for i in range(3)]
    back = list(webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8"))
    assert [int(sample["cls"]) for sample in back] == list(range(7))
    assert all(np.array_equal(sample["png"], image) for sample, image in zip(back, images, strict=True))
    with pytest.raises(OptionError, match="exists already"):
        write_webdataset(tmp_path, "test", images, list(range(7)), ["a"], ["b"])
    with pytest.raises(OptionError, match="7 images and 2 labels"):
        write_webdataset(tmp_path, "train", images, [0, 1], ["a"], ["b"])
