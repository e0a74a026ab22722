"""What merger and pruners are taught by. Pure functions of tensors. Imports torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "adversarial_loss",
    "answer_positions",
    "discriminator_losses",
    "distill_loss",
    "guide_loss",
    "margins",
    "task_loss",
    "temperature_at",
]


def temperature_at(step: int, steps: int, start: float, end: float, share: float) -> float:
    """Falls in a straight line from `start` to `end` over the first `share` of the steps, then stays."""
    done = min(1.0, step / max(1.0, share * steps))
    return start + (end - start) * done


def answer_positions(hidden: Tensor, answers: Tensor) -> Tensor:
    """(A, D) the hidden states (B, L, D) that say each token of the answers (B, T), which end the sequence.

    answers: -100 where one is shorter. A token is said one place before it.
    """
    length = answers.shape[1]
    return hidden[:, -length - 1 : -1][answers != -100]


def task_loss(logits: Tensor, answers: Tensor) -> Tensor:
    """Mean cross entropy of logits (A, V) at the answers' tokens (B, T), -100 left out."""
    return F.cross_entropy(logits.float(), answers[answers != -100])


def distill_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of logits (A, V), mean over the answers' tokens."""
    return F.kl_div(
        logits.float().log_softmax(-1), teacher.float().log_softmax(-1), reduction="batchmean", log_target=True
    )


def margins(logits: Tensor, answers: Tensor) -> Tensor:
    """(A,) by how much the right token's logit is above all others' together; logits (A, V), answers (B, T)."""
    right = answers[answers != -100].unsqueeze(1)
    others = logits.float().scatter(1, right, -torch.inf).logsumexp(dim=1)
    return logits.float().gather(1, right).squeeze(1) - others


def guide_loss(scores: Tensor, matters: Tensor) -> Tensor:
    """KL from how much each token matters (I, N), not negative, to the softmax of scores (I, N), mean over images.

    An image of which nothing matters counts as one of which all does.
    """
    matters = matters.float()  # half precision's smallest numbers are as large as what matters
    share = matters + 1e-12 * matters.amax(dim=1, keepdim=True) + torch.finfo(matters.dtype).tiny
    target = share / share.sum(dim=1, keepdim=True)
    return F.kl_div(scores.float().log_softmax(-1), target, reduction="batchmean")


def discriminator_losses(real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    """Of its logits for states of the unpruned run (to be 1) and of the pruned one (to be 0)."""
    return (
        F.binary_cross_entropy_with_logits(real, torch.ones_like(real)),
        F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)),
    )


def adversarial_loss(fake: Tensor) -> Tensor:
    """Of those who want the pruned run's states to be taken for the unpruned one's."""
    return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))
