"""Peak memory and time of evaluating a large gallery.

    python benchmarks/reid_memory.py                    1,000 queries against 100,000 x 1,536
    python benchmarks/reid_memory.py --queries 64

The peak is that of the whole process, interpreter, features and libraries included. The features are random, with
centres for the identities, so that there is something to rank.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from tokensieve.tasks.reid.evaluate import evaluate


def features(draw: np.random.Generator, pids: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """(N, D) float32, made in parts so that making them is not what takes the memory."""
    found = np.empty((len(pids), centres.shape[1]), dtype=np.float32)
    for start in range(0, len(pids), 4096):
        rows = slice(start, start + 4096)
        noise = draw.standard_normal((len(pids[rows]), centres.shape[1]), dtype=np.float32)
        found[rows] = centres[pids[rows]] + 4 * noise
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--gallery", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--identities", type=int, default=2000)
    parser.add_argument("--rerank", action="store_true")
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((args.identities, args.width), dtype=np.float32)
    pids_q = draw.integers(0, args.identities, args.queries)
    pids_g = draw.integers(0, args.identities, args.gallery)
    queries, gallery = features(draw, pids_q, centres), features(draw, pids_g, centres)
    cams_q, cams_g = draw.integers(0, 6, args.queries), draw.integers(0, 6, args.gallery)
    start = time.perf_counter()
    metrics = evaluate(queries, pids_q, cams_q, gallery, pids_g, cams_g, rerank=args.rerank)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    print(f"{args.queries} queries, gallery {args.gallery} x {args.width}: {seconds:.1f} s, peak {peak:.2f} GiB, "
          f"mAP {100 * metrics.map:.1f} %, R1 {100 * metrics.cmc1:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
