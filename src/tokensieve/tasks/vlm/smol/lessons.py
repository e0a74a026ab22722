"""What SmolLaVA's projector and LoRA learn from: packed questions and captions. A task of `training.fit`.

Imports torch and training; PEFT inside a function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tokensieve.errors import MissingMaterialError
from tokensieve.tasks.vlm.smol.features import Features, layout_of
from tokensieve.tasks.vlm.smol.model import LORA_LINEARS
from tokensieve.tasks.vlm.smol.packing import Pack, Texts, answer_logits, answers_right, pack, pool
from tokensieve.tasks.vlm.smol.questions import DESCRIBE, KINDS, PhotoQuestion, ask, caption
from tokensieve.tasks.vlm.smol.recipe import QuestionConfig
from tokensieve.training import Step, Validation
from tokensieve.training.distributed import gather_in_turn, rank, world_size
from tokensieve.utils.tensor_files import save_tensors

__all__ = ["QuestionTask", "add_lora", "answer_loss", "trained_tensors"]

_END = 0.1  # weight of the token that ends an answer, which is learned at once
_ASKED = {  # how often each kind is asked about one picture
    "photo": ("what", "exists", "exists", "exists", "sign", "colour"),
    "mosaic": ("at", "at", "at", "exists", "exists", "count", "where", "where", "beside", "beside", "sign", "colour"),
    "collage": ("at", "at", "at", "exists", "exists", "count", "where", "where", "sign", "colour"),
}


class QuestionTask:
    """Packed questions for projector and LoRA; tower and language model frozen, the latter in bfloat16."""

    def __init__(
        self, config: QuestionConfig, model: Any, tokenizer: Any, train: Features, held_out: Features,
        before: QuestionTask | None = None,
    ) -> None:  # fmt: skip
        """before: the task whose projector and LoRA, of the same model, are trained on."""
        self.config, self.texts = config, Texts(tokenizer)
        self.train, self.held_out = train, held_out
        inner = model.model
        self.projector, self.head = inner.multi_modal_projector.float(), model.lm_head
        self.language = inner.language_model
        if before is None:
            add_lora(self.language, config.rank, config.alpha, config.seed)
        self.lora = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in self.language.named_parameters() if p.requires_grad}
        )
        self.modules: Mapping[str, nn.Module] = {"projector": self.projector, "lora": self.lora}
        groups = [
            {"params": list(self.lora.parameters()), "lr": config.lr},
            {"params": list(self.projector.parameters()), "lr": config.projector_lr},
        ]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.99))
        self.optimisers: Mapping[str, Optimizer] = {"answers": optimiser}
        self._photos = [n for n in range(train.count) if layout_of(n) == "photo"]

    def load_projector(self, tensors: Mapping[str, Tensor]) -> None:
        """The projector's tensors of an exported file."""
        parts = {name.removeprefix("projector."): x.float() for name, x in tensors.items()}
        self.projector.load_state_dict({name: parts[name] for name in self.projector.state_dict()})

    def batches(self, start: int) -> Iterator[tuple[int, list[int]]]:
        step, c = start, self.config
        while True:
            rng = np.random.default_rng([c.seed, step])
            early = step < c.photos_until * c.steps
            chosen = rng.choice(self._photos if early else self.train.count, c.batch, replace=False)
            yield step, [int(n) for n in chosen[rank() :: world_size()]]
            step += 1

    def step(self, batch: tuple[int, list[int]], step: int) -> Step:
        number, chosen = batch
        packed, _ = self.pack(self.train, chosen, number, captions=True)
        logits = self.logits(self.train, chosen, packed)
        return Step({"answers": answer_loss(logits, packed)})

    def pack(
        self, features: Features, chosen: Sequence[int], seed: int, captions: bool, kinds: Sequence[str] | None = None
    ) -> tuple[Pack, list[list[PhotoQuestion]]]:
        """Questions about some pictures. kinds: of each, or None for as many as training asks."""
        asked, dialogues = [], []
        for number in chosen:
            picture = features.picture(number)
            rng = np.random.default_rng([self.config.seed, seed, number])
            questions = list({q.text: q for q in ask(picture, rng, kinds or _ASKED[picture.layout])}.values())
            dialogue = [(q.text, q.answer) for q in questions]
            asked.append(questions)
            dialogues.append([*dialogue, (DESCRIBE, caption(picture))] if captions else dialogue)
        return pack(self.texts, dialogues), asked

    def logits(self, features: Features, chosen: Sequence[int], packed: Pack) -> Tensor:
        image = pool(self.projector(features.get(list(chosen))), self.config.side)
        return answer_logits(self.language, self.head, image, packed).float()

    def validate(self) -> Validation:
        """Share of questions answered rightly, each token the likeliest behind the true ones before it, by kind."""
        numbers = range(self.held_out.count)
        own = [self._evaluate(number) for number in numbers[rank() :: world_size()]]
        right: dict[str, list[bool]] = defaultdict(list)
        for found in gather_in_turn(own):
            for kind, good in found:
                right[kind].append(good)
        shares = {kind: float(np.mean(right[kind])) for kind in KINDS if right[kind]}
        every = float(np.mean([good for goods in right.values() for good in goods]))
        return Validation(every, {**shares, "all": every})

    def _evaluate(self, number: int) -> list[tuple[str, bool]]:
        """One held-out picture: kinds of its questions, and whether the answer is right."""
        packed, asked = self.pack(self.held_out, [number], 0, captions=False, kinds=KINDS)
        right = answers_right(self.logits(self.held_out, [number], packed), packed, len(asked[0]))
        return [(q.kind, good) for q, good in zip(asked[0], right, strict=True)]

    def facts(self) -> dict[str, Any]:
        return {"stage": "questions", **asdict(self.config), "pictures": self.train.count}

    def export(self, path: Path) -> None:
        save_tensors(path, trained_tensors(self.projector, self.language, self.config), {"format": "pt"})


def answer_loss(logits: Tensor, packed: Pack) -> Tensor:
    """Mean cross entropy of the answers' tokens, their ends counted little."""
    asked = packed.targets >= 0
    weight = torch.where(packed.ends[asked], _END, 1.0)
    return (F.cross_entropy(logits, packed.targets[asked], reduction="none") * weight).sum() / weight.sum()


def add_lora(language: Any, rank: int, alpha: int, seed: int) -> None:
    """PEFT's LoRA on every linear layer of the language model, in float32; the rest frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise MissingMaterialError('training SmolLaVA needs the package peft: pip install "tokensieve[smol]"') from None
    language.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LORA_LINEARS))
        inject_adapter_in_model(config, language)
    for name, parameter in language.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def trained_tensors(projector: nn.Module, language: Any, config: QuestionConfig) -> dict[str, Tensor]:
    """What ships, float16: projector.NAME, and lora.MODULE.A and .B, whose product is added to a weight."""
    found = {f"projector.{name}": x for name, x in projector.state_dict().items()}
    for name, x in language.named_parameters():
        if ".lora_A." in name:
            found[f"lora.{name.split('.lora_A.')[0]}.A"] = x
        elif ".lora_B." in name:
            found[f"lora.{name.split('.lora_B.')[0]}.B"] = x * (config.alpha / config.rank)
    return {name: x.detach().to(torch.float16).cpu().contiguous() for name, x in found.items()}
