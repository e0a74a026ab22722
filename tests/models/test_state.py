"""Attach leaves no trace; copies, replicas, threads and neighbours share no state."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import tokensieve
from helpers.extra_token import OneMore
from tokensieve.errors import UnsupportedModelError
from tokensieve.methods.base import Method
from tokensieve.testing import TinyModel, tiny_model, tiny_models

MODES = ["prune", "analyse", "fuse"]


def snapshot(model: nn.Module) -> list:
    out: list = [list(model.state_dict())]
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if "hooks" in key and hasattr(value, "keys")}
        out.append((name, type(module), id(module), list(vars(module)), hooks))
    return out


def fuses(family: str) -> bool:
    return family.startswith("openclip") and family not in ("openclip_coca", "openclip_timm_siglip")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", tiny_models())
def test_nothing_is_left_after_removal(family: str, mode: str) -> None:
    if mode == "fuse" and not fuses(family):
        pytest.skip("no projection for single patches")
    tiny = tiny_model(family)
    images = tiny.images(2)
    with torch.no_grad():
        before, was = tiny.feature(tiny.model, images), snapshot(tiny.model)
        weights = {k: v.clone() for k, v in tiny.model.state_dict().items()}
        handle = tokensieve.attach(tiny.model, "anchor", keep=14, mode=mode)
        assert list(tiny.model.state_dict()) == was[0], "the state dict's keys change while attached"
        during = tiny.feature(tiny.model, images)
        assert tokensieve.attachment_of(tiny.model) is handle
        handle.remove()
        handle.remove()
        after = tiny.feature(tiny.model, images)
    assert tokensieve.attachment_of(tiny.model) is None
    assert snapshot(tiny.model) == was
    assert all(torch.equal(v, weights[k]) for k, v in tiny.model.state_dict().items())
    assert torch.equal(before, after)
    assert torch.equal(before, during) == (mode == "analyse")


def test_removed_after_an_error_inside() -> None:
    tiny = tiny_model("timm")
    was = snapshot(tiny.model)
    with pytest.raises(ZeroDivisionError), tokensieve.attach(tiny.model, "tome", keep=18):
        raise ZeroDivisionError
    assert snapshot(tiny.model) == was


def test_no_class_is_touched() -> None:
    tiny = tiny_model("openclip")
    classes = {type(m) for m in tiny.model.modules()}
    was = {cls: dict(vars(cls)) for cls in classes}
    with torch.no_grad(), tokensieve.attach(tiny.model, "tome", keep=18):
        tiny.feature(tiny.model, tiny.images(1))
        assert {cls: dict(vars(cls)) for cls in classes} == was


@pytest.mark.parametrize("family", ["openclip", "timm", "transformers_clip"])
def test_another_model_in_the_same_process_is_untouched(family: str) -> None:
    one, other = tiny_model(family), tiny_model(family, seed=1)
    images = one.images(2)
    with torch.no_grad():
        wanted = other.feature(other.model, images)
        with tokensieve.attach(one.model, "tome", keep=18):
            one.feature(one.model, images)
            assert torch.equal(other.feature(other.model, images), wanted)
            with tokensieve.attach(other.model, "grid", keep=9):
                assert not torch.equal(other.feature(other.model, images), wanted)
            assert torch.equal(other.feature(other.model, images), wanted)


def test_the_text_tower_is_untouched() -> None:
    for family in ("openclip_whole", "transformers_clip_whole"):
        tiny = tiny_model(family)
        text = torch.randint(2, 60, (3, 8), generator=torch.Generator().manual_seed(0))

        def encode(model=tiny.model, text=text):
            if hasattr(model, "encode_text"):
                return model.encode_text(text)
            return model.text_model(input_ids=text).last_hidden_state

        with torch.no_grad():
            wanted = encode()
            with tokensieve.attach(tiny.model, "tome", keep=18):
                assert torch.equal(encode(), wanted)


def test_a_second_attach_is_an_error() -> None:
    tiny = tiny_model("openclip_whole")
    with tokensieve.attach(tiny.model, "tome", keep=18):
        for model in (tiny.model, tiny.model.visual):
            with pytest.raises(UnsupportedModelError, match="already"):
                tokensieve.attach(model, "grid", keep=18)
    with tokensieve.attach(tiny.model, "grid", keep=18):
        pass


def test_nothing_to_see_before_the_first_forward() -> None:
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "tome", keep=18) as handle, pytest.raises(RuntimeError, match="no forward yet"):
        _ = handle.kept


# -- copies ---------------------------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_copy(tiny: TinyModel, make, mode: str) -> None:
    images = tiny.images(2)
    with torch.no_grad():
        untouched = tiny.feature(tiny.model, images)
        with tokensieve.attach(tiny.model, "anchor", keep=14, mode=mode) as handle:
            wanted = tiny.feature(tiny.model, images)
            twin = make(tiny.model)
            own = tokensieve.attachment_of(twin)
            assert own is not None
            assert own is not handle
            assert torch.equal(tiny.feature(twin, images), wanted)
            for p in twin.parameters():
                p.mul_(1.1)
            changed = tiny.feature(twin, images)
            assert not torch.equal(changed, wanted), "the copy reads the original's weights"
            assert torch.equal(tiny.feature(tiny.model, images), wanted), "the original reads the copy's weights"
            for p in twin.parameters():
                p.div_(1.1)
            own.remove()
            assert tokensieve.attachment_of(twin) is None
            assert torch.allclose(tiny.feature(twin, images), untouched, atol=1e-4)
            assert torch.equal(tiny.feature(tiny.model, images), wanted), "removing the copy's changed the original"
        assert torch.equal(tiny.feature(tiny.model, images), untouched)
        for (name, a), (_, b) in zip(tiny.model.named_modules(), twin.named_modules(), strict=True):
            assert type(a) is type(b), name
            assert set(vars(a)) == set(vars(b)), name


@pytest.mark.parametrize("family", tiny_models())
def test_deepcopy_while_attached(family: str) -> None:
    check_copy(tiny_model(family), copy.deepcopy, "prune")


@pytest.mark.parametrize("family", ["openclip", "openclip_whole", "timm", "timm_eva", "transformers_dinov2"])
def test_pickle_while_attached(family: str) -> None:
    check_copy(tiny_model(family), pickled, "prune")


@pytest.mark.parametrize("make", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("family", ["openclip", "openclip_timm"])
def test_copies_of_a_fusing_model(family: str, make) -> None:
    check_copy(tiny_model(family), make, "fuse")


# -- replicas and threads -----------------------------------------------------------------------------------------


def shifted(p: torch.Tensor, by: float) -> torch.Tensor:
    """Other weights, and not by a factor: what is normalised afterwards would hide that."""
    return p.detach() + by * torch.arange(p.numel()).sin().view_as(p)


def replicate(model: nn.Module, by: float) -> nn.Module:
    """As nn.DataParallel does it, with weights that differ, so that it shows whose weights are read."""
    modules = list(model.modules())
    copies = {id(m): m._replicate_for_data_parallel() for m in modules}
    for module in modules:
        twin = copies[id(module)]
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else copies[id(child)]
        for name, p in module._parameters.items():
            setattr(twin, name, None if p is None else shifted(p, by))
    return copies[id(model)]


@pytest.mark.parametrize(("family", "mode"), [("openclip", "prune"), ("timm", "prune"), ("transformers_clip", "prune")])
@pytest.mark.parametrize("method", ["tome", "anchor"])
def test_replicas_share_no_state(family: str, mode: str, method: str) -> None:
    check_replicas(family, mode, method)


@pytest.mark.parametrize("family", ["openclip", "openclip_timm"])
def test_fusing_replicas_read_their_own_weights(family: str) -> None:
    check_replicas(family, "fuse", "anchor")


def check_replicas(family: str, mode: str, method: str) -> None:
    tiny = tiny_model(family)
    a, b = tiny.images(2), tiny.images(3, seed=1)
    with torch.no_grad():
        wanted = []
        for by, images in ((0.0, a), (0.1, b)):
            alone = copy.deepcopy(tiny.model)
            for p in alone.parameters():
                p.copy_(shifted(p, by))
            with tokensieve.attach(alone, method, keep=14, mode=mode):
                wanted.append(tiny.feature(alone, images))
        with tokensieve.attach(tiny.model, method, keep=14, mode=mode) as handle:
            tiny.feature(tiny.model, tiny.images(1))
            last = handle.blocks.last
            one, two = replicate(tiny.model, 0.0), replicate(tiny.model, 0.1)
            got = together(lambda: tiny.feature(one, a), lambda: tiny.feature(two, b))
            assert handle.blocks.last is last, "a replica wrote into the original"
    for x, y in zip(got, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-5), (x - y).abs().max()


def together(*jobs):
    """Run the jobs in threads that start at once, twenty times; the last results."""
    barrier = threading.Barrier(len(jobs), timeout=60)

    def work(job):
        try:
            with torch.no_grad():
                for _ in range(20):
                    barrier.wait()
                    result = job()
        except BaseException:
            barrier.abort()  # or the others would wait for ever
            raise
        return result

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(work, job) for job in jobs]]


@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_mix(mode: str) -> None:
    tiny = tiny_model("openclip")
    batches = [tiny.images(1 + i, seed=i) for i in range(3)]
    with torch.no_grad(), tokensieve.attach(tiny.model, "anchor", keep=14, fold=True, mode=mode):
        wanted = [tiny.feature(tiny.model, images) for images in batches]
        got = together(*[lambda images=images: tiny.feature(tiny.model, images) for images in batches])
    for x, y in zip(got, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-6)


def test_a_fusing_forward_is_its_own_between_interleaved_ones() -> None:
    """A forward that starts while another is under way (here: from a hook) does not take its place."""
    tiny = tiny_model("openclip")
    a, b = tiny.images(2), tiny.images(2, seed=1)
    inner = []
    with torch.no_grad(), tokensieve.attach(tiny.model, "anchor", keep=14, at=1, mode="fuse") as handle:
        wanted = tiny.feature(tiny.model, a)

        def nested(*_) -> None:
            if not inner:
                inner.append(None)
                inner[0] = tiny.feature(tiny.model, b)

        hook = list(handle.blocks.children())[3].register_forward_hook(nested)
        got = tiny.feature(tiny.model, a)
        hook.remove()
        assert torch.equal(inner[0], tiny.feature(tiny.model, b))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_after_a_forward_with_gradients(make) -> None:
    """evit's weights have gradients: what is noted of a forward has none, or no copy could be made."""
    tiny = tiny_model("openclip")
    with tokensieve.attach(tiny.model, "evit", keep=14, at=1) as handle:
        tiny.feature(tiny.model, tiny.images(2)).sum().backward()
        assert not handle.scores[1].requires_grad
        assert tokensieve.attachment_of(make(tiny.model)) is not None


@pytest.mark.parametrize("method", [OneMore(), "tome"], ids=["one more", "tome"])
def test_what_was_seen_stays_after_removal(method: Method | str) -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, method, keep=20, at=1) as handle:
        planned = handle.tokens_per_layer, handle.cost().macs
        tiny.feature(tiny.model, tiny.images(2))
        seen = handle.tokens_per_layer, handle.cost().macs
        kept = handle.kept[1]
    assert planned == seen == (handle.tokens_per_layer, handle.cost().macs)  # the token more is planned for
    assert torch.equal(handle.kept[1], kept)
    with torch.no_grad(), tokensieve.attach(tiny.model, "random", keep=5, at=0):
        tiny.feature(tiny.model, tiny.images(2))
        assert torch.equal(handle.kept[1], kept)  # not the next one's


@pytest.mark.parametrize("mode", MODES)
def test_looking_at_an_attached_model_is_no_forward(mode: str) -> None:
    tiny = tiny_model("openclip")
    with torch.no_grad(), tokensieve.attach(tiny.model, "anchor", keep=14, at=[0, 2], mode=mode) as handle:
        before = tiny.feature(tiny.model, tiny.images(2))
        kept = handle.kept
        repr(tiny.model)
        blocks = tiny.model.transformer.resblocks
        assert len([*blocks, *blocks[1:]]) == 2 * len(blocks) - 1
        assert list(handle.kept) == list(kept) == [0, 2]
        assert torch.equal(tiny.feature(tiny.model, tiny.images(2)), before)
