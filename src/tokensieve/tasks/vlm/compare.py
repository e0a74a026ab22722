"""Two models' answers to the same questions: accuracy, loyalty, and what each cost. Imports answers and data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokensieve.models.decoder import VlmAttachment
from tokensieve.tasks.vlm.answers import Answers, Asked
from tokensieve.tasks.vlm.data import exact_match, normalise_answer, vqa_accuracy
from tokensieve.tasks.vlm.paired import paired_interval

__all__ = ["METRICS", "Comparison", "figures_of", "saved", "scores_of", "speed_against"]

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"exact": exact_match, "vqa": vqa_accuracy}


def scores_of(texts: Sequence[str], questions: Sequence[Asked], metric: str) -> list[float]:
    """Each answer's score."""
    return [METRICS[metric](text, q.answers) for text, q in zip(texts, questions, strict=True)]


@dataclass
class Comparison:
    """own: the answers to be evaluated. plain: the untouched model's, in the same order."""

    questions: Sequence[Asked]
    own: Sequence[str]
    plain: Sequence[str]
    metric: str = "exact"

    @cached_property
    def scores(self) -> list[float]:
        return scores_of(self.own, self.questions, self.metric)

    @cached_property
    def scores_plain(self) -> list[float]:
        return scores_of(self.plain, self.questions, self.metric)

    @cached_property
    def same(self) -> list[float]:
        """1 where the answer is the untouched model's, normalised, right or wrong."""
        pairs = zip(self.own, self.plain, strict=True)
        return [float(normalise_answer(a) == normalise_answer(b)) for a, b in pairs]

    def rows(self) -> list[dict[str, Any]]:
        """One for each type of question."""
        return [
            {"type": kind, **self._means([i for i, q in enumerate(self.questions) if q.kind == kind])}
            for kind in dict.fromkeys(q.kind for q in self.questions)
        ]

    def metrics(self) -> dict[str, float]:
        """Over all questions, then by type where there are several."""
        every = self._means(range(len(self.questions)))
        del every["questions"]
        rows = self.rows()
        return every | ({f"accuracy, {row['type']}": row["accuracy"] for row in rows} if len(rows) > 1 else {})

    def _means(self, which: Sequence[int]) -> dict[str, Any]:
        measures = {"accuracy": self.scores, "accuracy_baseline": self.scores_plain, "loyalty": self.same}
        means = {name: statistics.fmean(values[i] for i in which) for name, values in measures.items()}
        return {"questions": len(which), **means}

    def change(self) -> dict[str, float]:
        """Accuracy against the untouched model, with the 95 % interval of the difference."""
        change, low, high = paired_interval(self.scores, self.scores_plain, [q.name for q in self.questions])
        return {"accuracy_change": change, "accuracy_change_low": low, "accuracy_change_high": high}


def figures_of(answers: Answers, plan: VlmAttachment, reduced: bool) -> dict[str, Any]:
    """Tokens, MACs, times and cache of one model; figures of one prompt are means over the questions.

    plan: a handle that knows the model's shapes, to count the untouched model's MACs.
    """
    if reduced:
        macs, tower = answers.mean(answers.macs), answers.mean(answers.macs_tower)
        left = [answers.mean(layer) for layer in zip(*answers.left, strict=True)]
    else:
        prompts = list(zip(answers.text, answers.vision, strict=True))
        costs = {prompt: plan.cost(*prompt) for prompt in set(prompts)}
        macs = statistics.fmean(costs[prompt].macs_full for prompt in prompts)
        tower = statistics.fmean(costs[prompt].with_tower.macs_full for prompt in prompts)
        left = [statistics.fmean(answers.vision)] * plan.depth
    return {
        "gmacs": macs / 1e9,
        "gmacs_with_tower": tower / 1e9,
        "gmacs_own": answers.mean(answers.own_macs) / 1e9 if answers.own_macs else 0.0,
        "tokens_per_layer": " ".join(str(round(n)) for n in left),
        "tokens_average": statistics.fmean(left),
        "first_token_ms": 1e3 * statistics.median(answers.first),
        "decode_tokens_per_second": answers.decode_tokens_per_second,
        "kv_bytes": round(sum(answers.kv_bytes) / sum(answers.rows)),
        "overhead_ms": 1e3 * statistics.median(answers.overhead) if answers.overhead else None,
    }


def speed_against(own: Answers, plain: Answers, figures: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Time to the first token against the untouched model's, batch by batch; possible: by MACs, tower included."""
    ratios = [b / s for b, s in zip(plain.first, own.first, strict=True)]
    middle = statistics.median(ratios)
    low, high = (float(q) for q in np.percentile(ratios, (25, 75)))
    possible = base["gmacs_with_tower"] / figures["gmacs_with_tower"]
    return {
        "speedup": middle, "speedup_low": low, "speedup_high": high, "possible": possible, "gained": middle / possible,
    }  # fmt: skip


def saved(figures: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Shares of the untouched model's MACs, cache and tokens that are gone."""
    names = {"macs": "gmacs", "macs_with_tower": "gmacs_with_tower", "kv": "kv_bytes", "tokens": "tokens_average"}
    return {f"{name}_saved": 1.0 - figures[key] / base[key] for name, key in names.items()}
