"""Metrics against torchreid, scikit-learn and naive loops; re-ranking against torchreid; memory of a large gallery."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from tokensieve.errors import DataError, OptionError
from tokensieve.tasks.reid import distance
from tokensieve.tasks.reid.distance import distance_blocks, normalised
from tokensieve.tasks.reid.evaluate import Metrics, evaluate, mean_and_deviation, rank
from tokensieve.tasks.reid.rerank import reranked_blocks


def torchreid_file(name: str) -> types.ModuleType:
    """One file of torchreid, loaded by its path: the package itself wants things that are of no use here."""
    spec = importlib.util.find_spec("torchreid")
    if spec is None or spec.origin is None:
        pytest.skip("torchreid is not installed: `pip install --no-deps torchreid==0.2.5`")
    path = Path(spec.origin).parent / "reid" / name
    file = importlib.util.spec_from_file_location(f"referee_{path.stem}", path)
    assert file is not None
    assert file.loader is not None
    module = importlib.util.module_from_spec(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiled twin is not there
        file.loader.exec_module(module)
    return module


def problem(seed: int, queries: int = 25, gallery: int = 120, width: int = 12, ids: int = 8) -> tuple[Any, ...]:
    """Features with some order in them: identities have centres."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(ids, width))
    pids_q, pids_g = draw.integers(0, ids, queries), draw.integers(0, ids, gallery)
    return (
        centres[pids_q] + 1.3 * draw.normal(size=(queries, width)), pids_q, draw.integers(0, 3, queries),
        centres[pids_g] + 1.3 * draw.normal(size=(gallery, width)), pids_g, draw.integers(0, 3, gallery),
    )  # fmt: skip


def naive_distances(q: np.ndarray, g: np.ndarray) -> np.ndarray:
    out = np.zeros((len(q), len(g)))
    for i, a in enumerate(q):
        for j, b in enumerate(g):
            a1, b1 = a / (np.linalg.norm(a) or 1), b / (np.linalg.norm(b) or 1)
            out[i, j] = ((a1 - b1) ** 2).sum()
    return out


@pytest.mark.parametrize("seed", range(4))
def test_map_and_cmc_are_torchreids(seed: int) -> None:
    referee = torchreid_file("metrics/rank.py")
    q, pq, cq, g, pg, cg = problem(seed)
    cmc, mean_ap = referee.eval_market1501(naive_distances(q, g), pq, pg, cq, cg, max_rank=10)
    found = evaluate(q, pq, cq, g, pg, cg)
    assert found.map == pytest.approx(mean_ap, abs=1e-6)
    assert [found.cmc1, found.cmc5, found.cmc10] == pytest.approx([cmc[0], cmc[4], cmc[9]], abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_map_is_scikit_learns_and_minp_a_loops(seed: int) -> None:
    q, pq, cq, g, pg, cg = problem(seed)
    distances = naive_distances(q, g)
    precisions, penalties = [], []
    for i in range(len(q)):
        kept = [j for j in range(len(g)) if not (pg[j] == pq[i] and cg[j] == cq[i])]
        right = [pg[j] == pq[i] for j in kept]
        precisions.append(average_precision_score(right, [-distances[i, j] for j in kept]))
        order = sorted(kept, key=lambda j: distances[i, j])
        hardest = max(place for place, j in enumerate(order, 1) if pg[j] == pq[i])
        penalties.append(sum(right) / hardest)
    found = evaluate(q, pq, cq, g, pg, cg)
    assert found.map == pytest.approx(np.mean(precisions), abs=1e-6)
    assert found.minp == pytest.approx(np.mean(penalties), abs=1e-6)
    assert (found.queries, found.unmatched) == (25, 0)


@pytest.mark.parametrize(("k1", "k2", "weight"), [(20, 6, 0.3), (7, 1, 0.0), (5, 3, 0.8), (40, 6, 0.3)])
def test_reranking_is_torchreids(k1: int, k2: int, weight: float) -> None:
    theirs = torchreid_file("utils/rerank.py").re_ranking
    q, pq, cq, g, pg, cg = problem(11, *((8, 25) if k1 == 40 else (25, 120)))  # fewer images than k1, too
    roots = [np.sqrt(naive_distances(a, b)) for a, b in ((q, g), (q, q), (g, g))]  # it squares them
    wanted = theirs(*roots, k1=k1, k2=k2, lambda_value=weight)
    blocks = reranked_blocks(q.astype(np.float32), g.astype(np.float32), k1=k1, k2=k2, weight=weight)
    found = np.concatenate([block for _, block in blocks])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    if weight == 0:  # images without a common neighbour are all at distance 1: their order is anyone's
        return
    referee = torchreid_file("metrics/rank.py")
    cmc, mean_ap = referee.eval_market1501(wanted, pq, pg, cq, cg, max_rank=10)
    metrics = evaluate(q, pq, cq, g, pg, cg, rerank=True, k1=k1, k2=k2, weight=weight)
    assert metrics.map == pytest.approx(mean_ap, abs=1e-6)
    assert metrics.cmc1 == pytest.approx(cmc[0], abs=1e-6)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    data = problem(2)
    whole = evaluate(*data), evaluate(*data, rerank=True)
    monkeypatch.setattr(distance, "BLOCK_BYTES", 4 * 120 * 3)  # three queries a block
    starts = [start for start, _ in distance_blocks(data[0].astype(np.float32), data[3].astype(np.float32))]
    assert starts == list(range(0, 25, 3))
    assert (evaluate(*data), evaluate(*data, rerank=True)) == whole


def test_lengths_do_not_matter_and_zero_rows_are_allowed() -> None:
    q, pq, cq, g, pg, cg = problem(5)
    draw = np.random.default_rng(0)
    longer = evaluate(q * draw.uniform(0.1, 9, (25, 1)), pq, cq, g * draw.uniform(0.1, 9, (120, 1)), pg, cg)
    assert longer.map == pytest.approx(evaluate(q, pq, cq, g, pg, cg).map, abs=1e-9)
    q[3], g[7] = 0, 0
    block = np.concatenate([b for _, b in distance_blocks(q.astype(np.float32), g.astype(np.float32))])
    np.testing.assert_allclose(block, naive_distances(q, g), atol=1e-5)
    assert np.allclose(np.linalg.norm(normalised(q), axis=1), [0 if i == 3 else 1 for i in range(25)])


def test_the_filter_drops_only_the_same_identity_and_camera() -> None:
    q, pq, cq = [[1.0, 0]], [1], [0]
    gallery = [[1, 0], [0.9, 0.1], [0.5, 0.5], [0, 1.0]]  # by rising distance
    same_camera_first = evaluate(q, pq, cq, gallery, [1, 2, 1, 3], [0, 0, 1, 1])
    assert same_camera_first == Metrics(0.5, 0.0, 1.0, 1.0, 0.5, 1)  # itself dropped, a stranger before the match
    assert evaluate(q, pq, cq, gallery, [1, 2, 1, 3], [1, 0, 1, 1]).map == pytest.approx((1 + 2 / 3) / 2)


def test_scenes_take_the_place_of_cameras() -> None:
    """The same pid and scene dropped, whatever the camera: the naive result is that of a gallery without them."""
    q, pq, scenes_q, g, pg, scenes_g = problem(8)
    found = evaluate(q, pq, scenes_q, g, pg, scenes_g)
    one_by_one = []
    for i in range(len(q)):
        kept = ~((pg == pq[i]) & (scenes_g == scenes_q[i]))
        one_by_one.append(evaluate(q[[i]], pq[[i]], [-1], g[kept], pg[kept], scenes_g[kept]).map)
    assert found.map == pytest.approx(np.mean(one_by_one), abs=1e-12)


def test_queries_without_a_match_do_not_count() -> None:
    q, pq, cq, g, pg, cg = problem(9)
    pq[0] = 99
    found = evaluate(q, pq, cq, g, pg, cg)
    assert (found.queries, found.unmatched) == (24, 1)
    assert found.map == pytest.approx(evaluate(q[1:], pq[1:], cq[1:], g, pg, cg).map)
    with pytest.raises(DataError, match="no query has a match"):
        evaluate(q[:1], pq[:1], cq[:1], g, pg, cg)


def test_equal_distances_keep_the_gallerys_order() -> None:
    zero = np.zeros((4, 3))
    assert evaluate([[1, 0, 0]], [1], [0], zero, [2, 1, 2, 2], [1, 1, 1, 1]).map == 0.5
    assert evaluate([[1, 0, 0]], [1], [0], zero, [1, 2, 2, 2], [1, 1, 1, 1]).map == 1.0


def test_wrong_input_is_named() -> None:
    q, pq, cq, g, pg, cg = problem(0)
    with pytest.raises(DataError, match="12 wide, gallery features 5"):
        evaluate(q, pq, cq, g[:, :5], pg, cg)
    with pytest.raises(DataError, match="25 query features, but pids of shape"):
        evaluate(q, pq[:3], cq, g, pg, cg)
    with pytest.raises(DataError, match="gallery features of shape"):
        evaluate(q, pq, cq, g[:0], pg[:0], cg[:0])
    g[17, 2] = np.nan
    with pytest.raises(DataError, match="gallery features of image 17"):
        evaluate(q, pq, cq, g, pg, cg)
    with pytest.raises(OptionError, match="k1=0"):
        evaluate(q, pq, cq, q, pq, cq + 1, rerank=True, k1=0)


@pytest.mark.parametrize("rerank", [False, True])
def test_ranked_lists_are_the_ranking_that_is_scored(rerank: bool) -> None:
    q, pq, cq, g, pg, cg = problem(3)
    ranking = rank(q, pq, cq, g, pg, cg, top=120, rerank=rerank)
    assert len(ranking.lists) == 25
    for i, found in enumerate(ranking.lists):
        assert found.distances == sorted(found.distances)
        assert found.right == [pg[j] == pq[i] for j in found.gallery]
        dropped = {j for j in range(120) if pg[j] == pq[i] and cg[j] == cq[i]}
        assert set(found.gallery) == set(range(120)) - dropped
        hits = np.flatnonzero(found.right) + 1
        assert ranking.precision[i] == pytest.approx((np.arange(1, len(hits) + 1) / hits).mean())
        assert ranking.first[i] == hits[0]
    assert ranking.metrics == evaluate(q, pq, cq, g, pg, cg, rerank=rerank)
    assert {len(found.gallery) for found in rank(q, pq, cq, g, pg, cg, top=5).lists} == {5}


def test_seeds_are_averaged_with_the_sample_deviation() -> None:
    runs = [
        Metrics(0.5, 0.6, 0.7, 0.8, 0.1, 9),
        Metrics(0.6, 0.6, 0.9, 0.8, 0.2, 9),
        Metrics(0.7, 0.6, 0.8, 0.8, 0.3, 9),
    ]
    mean, deviation = mean_and_deviation(runs)
    assert mean == pytest.approx({"mAP": 0.6, "R1": 0.6, "R5": 0.8, "R10": 0.8, "mINP": 0.2})
    assert deviation == pytest.approx({"mAP": 0.1, "R1": 0, "R5": 0.1, "R10": 0, "mINP": 0.1})
    assert np.isnan(mean_and_deviation(runs[:1])[1]["mAP"])
    with pytest.raises(DataError):
        mean_and_deviation([])


@pytest.mark.slow
def test_a_gallery_of_100_000_fits_in_4_gib() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "reid_memory.py"
    done = subprocess.run([sys.executable, script, "--queries", "64"], capture_output=True, text=True, check=True)
    assert float(done.stdout.split("peak ")[1].split()[0]) < 4
