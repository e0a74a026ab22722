"""Training a selection: the forward is the pruned model's, the loss falls, and an interruption changes nothing."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import tokensieve
from tokensieve.cli.main import main
from tokensieve.errors import DataError, MissingMaterialError, OptionError, RecordError, UnsupportedModelError
from tokensieve.methods.trained.learned import Learned, ScoringNetworks, adapter_bytes, load_adapter
from tokensieve.models.encoder.soft import attach_soft
from tokensieve.tasks.clip import select
from tokensieve.tasks.clip.select import (
    Photos,
    SelectConfig,
    Subject,
    distillation_loss,
    keep_for,
    photos_in,
    state_folder,
    train_select,
)
from tokensieve.testing import tiny_model
from tokensieve.training.checkpoint import CHECKPOINTS, latest

SMALL = SelectConfig(held_out=8, steps=6, batch_size=4, keep=(18, 9), every=2, kl=0.5, lr=0.02)


def _method(seed=0):
    networks = ScoringNetworks(4, 32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for part in (networks.last, networks.scale, networks.shift, networks.lead):
        torch.nn.init.normal_(part, std=1.0 if part is networks.last else 0.1, generator=generator)
    return Learned(adapter=networks)


def _subject(name="openclip"):
    tiny = tiny_model(name)
    classes = F.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(7)), dim=-1)
    return Subject(tiny.model, lambda x: tiny.feature(tiny.model, x), "tiny", classes, scale=5.0)


def _photos(n=30):
    images = torch.randn(n, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    return Photos(images.numpy(), torch.as_tensor)


# -- the soft forward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["openclip", "openclip_layerscale", "timm", "timm_registers", "transformers_clip"])
@pytest.mark.parametrize("keep", [30, 9, 1])
def test_the_soft_forward_is_the_pruned_one(family, keep):
    tiny, method = tiny_model(family), _method()
    images = tiny.images(3)
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=keep) as handle:
        wanted, kept = tiny.feature(tiny.model, images), handle.kept
    with attach_soft(tiny.model, method, keep=keep) as handle:
        got = tiny.feature(tiny.model, images)
        assert all(torch.equal(handle.kept[block], index) for block, index in kept.items())
    assert torch.allclose(got, wanted, atol=1e-4)


def test_gradients_reach_every_network_that_the_feature_depends_on():
    tiny, method = tiny_model("openclip"), _method()
    tiny.model.requires_grad_(False)
    with attach_soft(tiny.model, method, keep=9):
        tiny.feature(tiny.model, tiny.images(2)).square().sum().backward()
    for name, p in method.networks.named_parameters():
        reached = p.grad.flatten(1).abs().sum(dim=1) > 0
        # CLS has read the patches when the last block cuts, but is itself changed by the sizes they then have
        assert reached.tolist() == [True, True, True, name not in ("scale", "shift")], name
        assert p.grad.isfinite().all()


def test_a_gradient_says_what_a_dropped_patch_would_change(monkeypatch):
    """Against differences: the gate of one ghost moved by hand, the forward run again."""
    tiny, method = tiny_model("openclip"), _method()
    tiny.model.requires_grad_(False)
    images, gates, moved = tiny.images(1).double(), [], {}
    tiny.model.double()
    exact = select.attach_soft.__globals__["keep_gate"]

    def gate(score, hard, tau):
        value = exact(score, hard, tau).detach().double()
        for (cut, patch), by in moved.items():
            if cut == len(gates):
                value[0, patch] += by
        gates.append((value.requires_grad_(), hard))
        return value

    monkeypatch.setitem(select.attach_soft.__globals__, "keep_gate", gate)

    def loss():
        gates.clear()
        with attach_soft(tiny.model, method, keep=9):
            return tiny.feature(tiny.model, images).square().sum()

    loss().backward()
    grads, masks = [g.grad[0].clone() for g, _ in gates[:3]], [hard[0].clone() for _, hard in gates[:3]]
    start = loss().item()
    for cut, (grad, hard) in enumerate(zip(grads, masks, strict=True)):
        for patch in (hard.nonzero()[0].item(), (~hard).nonzero()[0].item()):
            step = 1e-5 if not hard[patch] else -1e-5  # a kept one can only fade, a dropped one only appear
            moved = {(cut, patch): step}
            slope = (loss().item() - start) / step
            moved = {}
            assert grad[patch].item() == pytest.approx(slope, rel=0.02, abs=1e-4)


def test_towers_that_pool_over_patches_are_refused():
    tiny = tiny_model("openclip_avg")
    with pytest.raises(UnsupportedModelError, match="pools over patches"):
        attach_soft(tiny.model, _method(), keep=9)
    with tokensieve.attach(tiny.model, "sieve", keep=9):  # nothing was left attached
        pass
    with pytest.raises(OptionError, match="tau=0"):
        attach_soft(tiny_model("openclip").model, _method(), keep=9, tau=0.0)


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    g = torch.Generator().manual_seed(0)
    a, b, classes = (torch.randn(n, 4, generator=g) for n in (2, 2, 3))
    total = 0.0
    for x, y in zip(a, b, strict=True):
        x, y = x / x.norm(), y / y.norm()
        p, q = ((5.0 * classes @ v).softmax(dim=0).tolist() for v in (y, x))
        total += 1 - (x @ y).item() + 0.5 * sum(s * math.log(s / t) for s, t in zip(p, q, strict=True))
    assert distillation_loss(a, b, classes, 5.0, 0.5).item() == pytest.approx(total / 2, rel=1e-4)
    assert distillation_loss(a, a, classes, 5.0, 0.5).item() == pytest.approx(0.0, abs=1e-6)


def test_the_loss_falls_and_the_best_adapter_is_written(tmp_path):
    """Few images, seen again and again, that the held-out ones are among: learning them must show."""
    subject, output = _subject(), tmp_path / "a.safetensors"
    config = SelectConfig(held_out=4, steps=60, batch_size=8, keep=(6,), every=60, kl=0.0, lr=0.02, tau=0.3)
    lines: list[str] = []
    evaluations, losses = train_select(subject, _photos(12), config, output, tell=lines.append)
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert [j.step for j in evaluations] == [0, 60]
    assert lines[0].startswith("step 0: held-out loss")
    networks = load_adapter(output)
    assert networks.depth == 4
    assert (networks.unit != 1.0).all()  # the length of tokens was measured where learned cuts, at every block


def test_an_interrupted_run_goes_on_bit_equal_from_every_step(tmp_path):
    """Six images to train on in batches of four: all are seen again, in other batches than at first."""
    whole = tmp_path / "whole.safetensors"
    evaluations, losses = train_select(_subject(), _photos(14), SMALL, whole)
    for stop in range(1, SMALL.steps + 1):
        parts = tmp_path / f"parts{stop}.safetensors"

        def interrupt(step, stop=stop):
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_select(_subject(), _photos(14), SMALL, parts, tick=interrupt)
        assert latest(state_folder(parts) / CHECKPOINTS).name == f"step-{stop // 2 * 2:08d}.safetensors"
        assert train_select(_subject(), _photos(14), SMALL, parts, resume=True) == (evaluations, losses)
        mine, theirs = load_adapter(parts).state_dict(), load_adapter(whole).state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert train_select(_subject(), _photos(14), SMALL, parts, resume=True) == (evaluations, losses)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("parts")} >= {
        "whole.safetensors",
        "whole.safetensors.state",
    }
    with pytest.raises(OptionError, match=r"whole\.safetensors is of a training run already: go on with --resume"):
        train_select(_subject(), _photos(14), SMALL, whole)


def test_what_cannot_go_on_is_named(tmp_path):
    output = tmp_path / "a.safetensors"
    with pytest.raises(MissingMaterialError, match=r"a\.safetensors\.state"):
        train_select(_subject(), _photos(), SMALL, output, resume=True)
    state_folder(output).write_bytes(b"half a fi")
    for resume in (True, False):
        with pytest.raises(RecordError, match=r"a\.safetensors\.state is not a folder of checkpoints"):
            train_select(_subject(), _photos(), SMALL, output, resume=resume)
    state_folder(output).unlink()
    train_select(_subject(), _photos(), SMALL, output)
    last = latest(state_folder(output) / CHECKPOINTS)
    whole = last.read_bytes()
    last.write_bytes(whole[:-9])
    with pytest.raises(RecordError, match=r"a\.safetensors\.state.*truncated"):
        train_select(_subject(), _photos(), SMALL, output, resume=True)
    last.write_bytes(whole)
    other = SelectConfig(**(vars(SMALL) | {"lr": 0.1}))
    with pytest.raises(OptionError, match=r"lr was 0\.02, is 0\.1; images was 30, is 29"):
        train_select(_subject(), _photos(29), other, output, resume=True)


def test_the_model_is_left_as_it_was(tmp_path):
    subject = _subject()
    subject.model.train()
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    train_select(subject, _photos(), SMALL, tmp_path / "a.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in subject.model.parameters())
    assert all(module.training for module in subject.model.modules())


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    subject = _subject()
    broken = Subject(subject.model, lambda x: subject.encode(x) * math.nan, "broken")
    config = SelectConfig(**(vars(SMALL) | {"kl": 0.0}))
    with pytest.raises(OptionError, match="the loss of networks is nan at step 0: lower the learning rate"):
        train_select(broken, _photos(), config, tmp_path / "a.safetensors")


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(OptionError, match="steps=0"):
        SelectConfig(steps=0)
    with pytest.raises(OptionError, match="lr=0"):
        SelectConfig(lr=0.0)
    with pytest.raises(OptionError, match="11 images are too few for 8 held-out"):
        train_select(_subject(), _photos(11), SMALL, tmp_path / "a")
    plain = Subject(_subject().model, _subject().encode, "plain")
    with pytest.raises(OptionError, match="plain has no zero-shot classifier"):
        train_select(plain, _photos(), SMALL, tmp_path / "a")


def test_budgets_come_from_the_speed_they_make_possible():
    model = tiny_model("openclip").model
    keep = keep_for(model, _method(), 1.5)
    possible = []
    for budget in (keep, keep + 1):
        with tokensieve.attach(model, _method(), keep=budget) as handle:
            possible.append(handle.cost().possible)
    assert possible[0] >= 1.5 > possible[1]


def test_photos_of_a_folder(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.png", "deep/a.jpg"):
        Image.new("L", (5, 4)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    files = photos_in(tmp_path)
    assert [file.name for file in files] == ["b.png", "a.jpg"]
    assert len(photos_in(tmp_path, 1)) == 1
    seen = Photos(files, lambda image: torch.tensor([*image.size, len(image.getbands())])).pixels([1, 0])
    assert seen.tolist() == [[5, 4, 3]] * 2
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(DataError, match=r"b\.png cannot be read: not an image"):
        Photos(files, torch.as_tensor).pixels([0])
    with pytest.raises(MissingMaterialError, match="absent: there is no such folder"):
        photos_in(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingMaterialError, match=r"empty: no \.jpg"):
        photos_in(tmp_path / "empty")


# -- the command ------------------------------------------------------------------------------------------------------


def _small(image):
    return torch.as_tensor(np.array(image.resize((48, 48)))).permute(2, 0, 1).float() / 127.5 - 1.0


def test_the_command_trains_an_adapter_that_eval_takes(tiny, run, here, monkeypatch, capsys):
    (here / "photos").mkdir()
    for i in range(10):
        noise = np.random.default_rng(i).integers(0, 255, (60, 60, 3), dtype=np.uint8)
        Image.fromarray(noise).save(here / "photos" / f"{i}.png")
    monkeypatch.setattr(select, "default_subject", lambda kl: (_subject(), _small))
    train = ["train", "select", "--photos", "photos", "--held_out", "4", "--batch_size", "4", "--steps", "2", "--every",
             "1", "--keep", "9", "0.5", "-o", "a.safetensors"]  # fmt: skip
    assert main(train) == 0
    out = capsys.readouterr().out
    assert out.count("held-out loss") == 3
    assert out.endswith("adapter: a.safetensors\n")
    assert main([*train, "--resume"]) == 0
    first = run(*tiny.usual, "--method", "learned", "--adapter", "a.safetensors", "--keep", "64")
    assert first["reduced"]
    (here / "a.safetensors").write_bytes(adapter_bytes(_method().networks, {}))
    again = run(*tiny.usual, "--method", "learned", "adapter=a.safetensors", "--keep", "64")
    assert first["config_id"] != again["config_id"]  # another adapter under the same name is another run


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "selekt"], 'Did you mean "select"?'),
        (["train", "select", "--step", "3"], 'Did you mean "--steps"?'),
        (["train", "select", "--steps", "0"], "--steps 0: at least 1"),
        (["train", "select", "--images", "0"], "--images 0"),
        (["train", "select", "--photos", "absent"], "absent"),
        (["train", "select", "--keep", "half"], "'half'"),
        (["eval", "--method", "learned", "--keep", "0.5"], "train select"),
        (["eval", "--method", "learned", "--keep", "0.5", "--adapter", "absent.safetensors"], "absent.safetensors"),
        (["eval", "--method", "tome", "--keep", "0.5", "--adapter", "a"], "adapter"),
    ],
)
def test_wrong_command_lines_are_one_line(words, named, here, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1
