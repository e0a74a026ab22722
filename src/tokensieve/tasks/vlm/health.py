"""What goes wrong in training, noticed by the program: one warning each, with the setting to change. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from tokensieve.tasks.vlm.config import VlmConfig

__all__ = ["Health"]

_WINDOW = 50  # steps over which the discriminator is watched
_WON = 0.95
_GAP = 0.03
_APART = 0.005


class Health:
    """Told of every step and every validation. `done`: what was warned of already; it is not said again."""

    def __init__(self, config: VlmConfig, steps: int, warn: Callable[[str], None]) -> None:
        self.config, self.steps, self.warn = config, steps, warn
        self.done: set[str] = set()
        self._real: deque[float] = deque(maxlen=_WINDOW)
        self._fake: deque[float] = deque(maxlen=_WINDOW)

    def start(self) -> None:
        """Before the first step."""
        m = self.config.method
        if m.temperature == m.temperature_min or m.temperature_anneal_rate * self.steps < 2:
            self._say(
                "temperature",
                f"the temperature will not fall ({m.temperature:g} -> {m.temperature_min:g} over "
                f"{m.temperature_anneal_rate * self.steps:.0f} steps): check temperature_min, temperature_anneal_rate "
                "and the number of steps",
            )

    def step(self, scalars: Mapping[str, float]) -> None:
        """disc_prob_real and disc_prob_fake of one step, where there is a discriminator."""
        if "disc_prob_real" not in scalars:
            return
        self._real.append(scalars["disc_prob_real"])
        self._fake.append(scalars["disc_prob_fake"])
        if len(self._real) < _WINDOW:
            return
        real, fake = (sum(values) / _WINDOW for values in (self._real, self._fake))
        if real > _WON and fake < 1 - _WON:
            lr = self.config.dl.optimizers.discriminator.lr
            self._say(
                "discriminator",
                f"the discriminator has won (disc_prob_real {real:.2f}, disc_prob_fake {fake:.2f}): lower "
                f"optimizers.discriminator.lr (now {lr:g}), or raise disc_reinit_prob or adv_loss_weight",
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of one validation."""
        if metrics["avg_merged_tokens"] > 0.95 * metrics["avg_original_tokens"]:
            self._say(
                "tokens",
                f"tokens do not fall: {metrics['avg_merged_tokens']:.0f} of {metrics['avg_original_tokens']:.0f} are "
                "left after merging: lower merge_ratio (and target_merge_tokens)",
            )
        m = self.config.method
        annealed = step >= m.temperature_anneal_rate * self.steps
        gap = metrics["accuracy_baseline"] - metrics["accuracy_hard"]
        if annealed and gap > _GAP:
            self._say(
                "gap",
                f"pruning costs {100 * gap:.1f} points of accuracy at step {step}: raise task_loss_weight or "
                "merge_ratio (and target_merge_tokens) or pruner_keep, or lower adv_loss_weight",
            )
        apart = abs(metrics["accuracy_soft"] - metrics["accuracy_hard"])
        if annealed and apart > _APART:
            self._say(
                "apart",
                f"accuracy_soft and accuracy_hard are {100 * apart:.1f} points apart at step {step}: lower "
                "temperature_min, or leave straight_through at true",
            )

    def _say(self, what: str, line: str) -> None:
        if what not in self.done:
            self.done.add(what)
            self.warn(f"warning: {line}")
