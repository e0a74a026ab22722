"""learned: untrained it is sieve; trained it obeys its networks, written out as loops; wrong files are named."""

import copy
import hashlib
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import tokensieve
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import MissingMaterialError, OptionError, RecordError, UnsupportedModelError
from tokensieve.methods.sieve import SieveMethod
from tokensieve.methods.trained.learned import (
    BOUND,
    Learned,
    ScoringNetworks,
    adapter_bytes,
    adapter_file,
    load_adapter,
)
from tokensieve.models.attach import attachment_of
from tokensieve.tasks.clip.config import SieveConfig
from tokensieve.testing import contract_cases, tiny_model

DEPTH, WIDTH = 4, 8


def _networks(depth=DEPTH, width=WIDTH, trained=True):
    networks = ScoringNetworks(depth, width, hidden=6, seed=3).requires_grad_(False)
    if trained:
        networks.last.copy_(torch.randn(networks.last.shape, generator=torch.Generator().manual_seed(4)))
        networks.exponents.copy_(torch.randn(networks.exponents.shape, generator=torch.Generator().manual_seed(6)))
        networks.bias.copy_(torch.randn(networks.bias.shape, generator=torch.Generator().manual_seed(5)))
    return networks


def _view(seed, block=2, n=14, heads=2, prefix=1, merged=False):
    g = torch.Generator().manual_seed(seed)
    length, d = prefix + n, WIDTH // heads
    q, k = (torch.randn(2, heads, length, d, generator=g) for _ in range(2))
    x = torch.randn(2, length, WIDTH, generator=g)
    size = torch.randint(1, 5, (2, n), generator=g).float() if merged else None
    return TokenView(x, q, k, scale=d**-0.5, prefix=prefix, has_cls=prefix > 0, size=size, depth=block / DEPTH)


@pytest.mark.parametrize("merged", [False, True])
def test_merged_tokens_are_mended_by_what_they_stand_for(merged):
    networks, view = _networks(), _view(1, merged=merged)
    generator = torch.Generator().manual_seed(8)
    for part in (networks.scale, networks.shift, networks.lead):
        part.copy_(torch.randn(part.shape, generator=generator))
    networks.unit.copy_(torch.tensor([1.0, 2.0, 0.5, 3.0]))
    given = view.size if merged else None
    found = Learned(adapter=networks).reduce(view, 6)
    out, size = found.apply(view.tokens, 1, 0, given)
    plain, same = Reduction(found.keep, found.drop, found.into).apply(view.tokens, 1, 0, given)
    assert torch.equal(size, same)
    for b in range(2):
        for k in range(6):
            x, weight = plain[b, 1 + k], float(size[b, k].log())
            wanted = x + weight * (networks.scale[2] * x + 0.5 * networks.shift[2])
            assert torch.allclose(out[b, 1 + k], wanted, atol=1e-5)
        mean = float(size[b].log().mean())
        assert torch.allclose(out[b, 0], plain[b, 0] + mean * 0.5 * networks.lead[2], atol=1e-5)
    whole = Learned(adapter=networks).reduce(view, view.n)
    assert torch.equal(whole.apply(view.tokens, 1, 0, None)[0], view.tokens)


def test_the_shipped_adapter_fits_the_default_tower():
    networks = load_adapter("vit-s14")
    assert (networks.depth, networks.width) == (12, 384)
    assert networks.shift.abs().sum() > 0  # it was trained
    named = SieveConfig(method="learned", keep=57, options={"adapter": "vit-s14"}).plain()
    assert named["adapter_sha256"] == hashlib.sha256(adapter_file("vit-s14").read_bytes()).hexdigest()
    with pytest.raises(UnsupportedModelError, match="12 blocks and width 384"):
        tokensieve.attach(tiny_model("openclip").model, "learned", adapter="vit-s14", keep=9)


def _write(path, networks=None, **facts):
    path.write_bytes(adapter_bytes(networks or _networks(), facts))
    return str(path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [13, 6, 1])
def test_untrained_it_is_sieve_exactly(seed, keep):
    view = _view(seed, merged=seed == 1)
    mine = Learned(adapter=_networks(trained=False)).reduce(view, keep)
    other = SieveMethod().reduce(view, keep)
    for name in ("keep", "drop", "into", "scores"):
        assert torch.equal(getattr(mine, name), getattr(other, name)), name


def _naive(view, b, block, keep, networks, weight):
    n, p, heads = view.n, view.prefix, view.k.shape[1]
    importance = view.importance()[b]
    share = importance / importance.mean()

    def alike(i, j):
        cosines = [torch.cosine_similarity(view.k[b, h, p + i], view.k[b, h, p + j], dim=0) for h in range(heads)]
        return sum(c.item() for c in cosines) / heads

    ranked = sorted(range(n), key=lambda i: -importance[i].item())
    price = {}
    for i in ranked[1:]:
        distance = 1 - max(alike(i, j) for j in range(n) if importance[j] > importance[i])
        x = view.x[b, i]
        normed = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
        facts = torch.tensor([distance, share[i].item(), view.size[b, i].item()]).log()
        hidden = F.gelu(torch.cat([normed, facts]) @ networks.first[block] + networks.bias[block])
        change = hidden @ networks.last[block] + facts @ networks.exponents[block]
        change = BOUND * torch.tanh(change / BOUND)
        price[i] = distance * share[i].item() ** weight * change.exp().item()
    gone = sorted(price, key=lambda i: price[i])[: n - keep]
    stay = [i for i in range(n) if i not in gone]
    better = {i: [j for j in stay if importance[j] > importance[i]] for i in gone}
    return stay, {i: max(better[i], key=lambda j: alike(i, j)) for i in gone}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [13, 7, 2])
def test_against_loops(seed, keep):
    networks, view = _networks(), _view(seed, block=seed, prefix=seed % 2, merged=seed > 1)
    result = Learned(adapter=networks, weight=0.5).reduce(view, keep)
    for b in range(2):
        stay, target = _naive(view, b, seed, keep, networks, 0.5)
        assert result.keep[b].tolist() == stay
        into = {i: stay[s] for i, s in zip(result.drop[b].tolist(), result.into[b].tolist(), strict=True)}
        assert into == target


def test_each_block_has_a_network_of_its_own():
    method = Learned(adapter=_networks())
    chosen = {tuple(method.reduce(_view(0, block=block), 6).keep[0].tolist()) for block in range(DEPTH)}
    assert len(chosen) > 1


@pytest.mark.parametrize("rule", contract_cases(Learned, adapter=_networks(4, 32), models=("openclip", "timm")))
def test_contract(rule):
    rule()


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_written(tmp_path):
    path = _write(tmp_path / "a.safetensors", model="m", recipe={"steps": 3})
    networks, again = _networks(), load_adapter(path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, networks.state_dict()[name].half().float()), name
    assert (again.depth, again.width) == (DEPTH, WIDTH)
    assert not any(p.requires_grad for p in again.parameters())


def test_wrong_files_are_errors_that_name_them(tmp_path):
    with pytest.raises(OptionError, match=r"adapter=''.*train select"):
        Learned()
    with pytest.raises(MissingMaterialError, match=r"absent\.safetensors"):
        Learned(adapter=str(tmp_path / "absent.safetensors"))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(adapter_bytes(_networks(), {})[:-40])
    with pytest.raises(RecordError, match=r"cut\.safetensors: truncated or not a safetensors file"):
        Learned(adapter=path)
    path = tmp_path / "text.safetensors"
    path.write_text("no tensors")
    with pytest.raises(RecordError, match=r"text\.safetensors: truncated or not a"):
        Learned(adapter=path)
    path = tmp_path / "other.safetensors"
    save_file({"first": torch.zeros(2)}, path)
    with pytest.raises(RecordError, match=r"other\.safetensors has the format None"):
        Learned(adapter=path)
    facts = {"format": "tokensieve-select-2", "depth": "4", "width": "9"}
    for state in ({"first": torch.zeros(2)}, {"last": torch.zeros(2)}, _networks().state_dict()):
        path = tmp_path / "odd.safetensors"
        save_file(state, path, metadata=facts)
        with pytest.raises(OptionError, match=r"odd\.safetensors: its header does not match its tensors"):
            Learned(adapter=path)


def test_an_adapter_of_another_encoder_is_refused_when_attached(tmp_path):
    tiny = tiny_model("openclip")
    for depth, width in ((8, 32), (4, 16)):
        path = _write(tmp_path / "a.safetensors", _networks(depth, width))
        with pytest.raises(UnsupportedModelError, match=rf"a\.safetensors is for.*{depth} blocks and width {width}"):
            tokensieve.attach(tiny.model, "learned", keep=9, adapter=path)
    assert attachment_of(tiny.model) is None
    with pytest.raises(UnsupportedModelError, match="width 8, these have 16"):
        Learned(adapter=_networks()).reduce(TokenView.of(torch.randn(1, 10, 16)), 4)


# -- attached ---------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_of_a_reduced_model_agree(tmp_path):
    tiny = tiny_model("openclip")
    path = _write(tmp_path / "a.safetensors", _networks(4, 32))
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, "learned", keep=9, adapter=path):
        wanted = tiny.feature(tiny.model, images)
        buffer = io.BytesIO()
        pickle.dump(tiny.model, buffer)
        for other in (copy.deepcopy(tiny.model), pickle.loads(buffer.getvalue())):
            assert torch.equal(tiny.feature(other, images), wanted)
    with torch.no_grad(), tokensieve.attach(tiny.model, "sieve", keep=9):
        assert not torch.allclose(tiny.feature(tiny.model, images), wanted, atol=1e-3)


@pytest.mark.slow
def test_a_graph_of_it_gives_the_same():
    tiny = tiny_model("openclip")
    images = tiny.images(2)
    with torch.no_grad(), tokensieve.attach(tiny.model, Learned(adapter=_networks(4, 32)), keep=9):
        wanted = tiny.feature(tiny.model, images)
        compiled = torch.compile(tiny.model, backend="eager")
        assert torch.allclose(tiny.feature(compiled, images), wanted, atol=1e-5)
