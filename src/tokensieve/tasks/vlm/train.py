"""Train merger and pruners of a frozen LLaVA: the task that the one loop runs, and the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import DataError, OptionError
from tokensieve.methods.trained import merger as merging
from tokensieve.methods.trained import pruner as pruning
from tokensieve.methods.trained.adapter_file import about_adapter, adapter_tensors
from tokensieve.methods.two_stage import TwoStage
from tokensieve.models.decoder.handle import VlmAttachment, attach_vlm
from tokensieve.models.decoder.soft import Softness, attach_soft
from tokensieve.models.families.vlm.llava import encode
from tokensieve.tasks.vlm.backbone import Sizes, build_networks, empty_model, load_backbone, sizes_of
from tokensieve.tasks.vlm.batches import Batch, FileQuestions, GeneratedQuestions, Questions
from tokensieve.tasks.vlm.config import GENERATED, VlmConfig
from tokensieve.tasks.vlm.discriminator import Discriminator
from tokensieve.tasks.vlm.guide import answer_slopes
from tokensieve.tasks.vlm.health import Health
from tokensieve.tasks.vlm.losses import (
    adversarial_loss,
    answer_positions,
    discriminator_losses,
    distill_loss,
    guide_loss,
    task_loss,
    temperature_at,
)
from tokensieve.tasks.vlm.plan import TEXT, Plan, make_plan, own_macs, tokens_per_layer
from tokensieve.training import FitConfig, FitResult, Step, Validation, fit
from tokensieve.training.distributed import (
    average_numbers,
    gather_in_turn,
    own_part,
    own_share,
    rank,
    world_size,
)
from tokensieve.utils.tensor_files import save_tensors

__all__ = ["VlmTask", "build_task", "plan_only", "task_plan", "train_vlm"]

_DISCRIMINATOR = "discriminator"


class VlmTask:
    """Merger, pruners and discriminator of one configuration, on one frozen model. Same seed, same task."""

    def __init__(self, config: VlmConfig, model: Any, questions: Questions) -> None:
        self.config, self.model, self.questions = config, model, questions
        self.sizes: Sizes = sizes_of(config, model)
        self.merger, self.pruners = build_networks(config, self.sizes)
        m = config.method
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.dl.seed + 1)
            self.discriminator = Discriminator(self.sizes.width, m.pruner_d_internal)
        self.method = TwoStage(
            first=merging.Merger(adapter=self.merger), second=pruning.Pruner(adapter=self.pruners),
            merge_keep=self.sizes.merged,
        )  # fmt: skip
        self.softness = Softness(straight_through=m.straight_through)
        self.modules: dict[str, nn.Module] = {
            merging.PART: self.merger, pruning.PART: self.pruners, _DISCRIMINATOR: self.discriminator
        }  # fmt: skip
        rates = config.dl.optimizers.model_dump()
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            name: torch.optim.Adam(part.parameters(), lr=rates[name]["lr"]) for name, part in self.modules.items()
        }
        self.steps = config.dl.epochs * math.ceil(len(questions) / config.dl.batch_size)
        self.folder = Path(config.output_dir)
        self.done = 0
        self.warn: Callable[[str], None] = lambda line: None
        self.health = Health(config, self.steps, self._tell)
        self._baseline: float | None = None

    # -- the model with and without ---------------------------------------------------------------------------------

    @property
    def counts(self) -> list[int]:
        """Vision tokens that each pruner leaves."""
        return self.pruners.counts(self.sizes.merged)

    def soft(self, prompt: Tensor, merged: int) -> VlmAttachment:
        """The model as it is trained, with that many tokens left by the merger."""
        self.softness.tau, self.softness.prompt = self.merger.temperature, prompt
        method, counts = replace(self.method, merge_keep=merged), self.pruners.counts(merged)
        return attach_soft(self.model, method, self.softness, keep=counts, at=self.pruners.layers)

    def merged_at(self, step: int) -> int:
        """How many tokens the merger leaves in a step: drawn by the step alone, the same in all processes."""
        spread = self.config.method.budget_spread
        if not spread:
            return self.sizes.merged
        generator = torch.Generator().manual_seed(self.config.dl.seed * 1_000_003 + step)
        drawn = 2.0 * float(torch.rand((), generator=generator)) - 1.0
        return max(1, min(self.sizes.patches - 1, round(self.sizes.merged * (1.0 + spread) ** drawn)))

    def hard(self) -> VlmAttachment:
        """The model as it will be used: tokens really leave."""
        return attach_vlm(
            self.model, self.method, keep=self.counts, at=self.pruners.layers, keep_average=None, schedule=None,
            positions=None,
        )  # fmt: skip

    @torch.no_grad()
    def _teacher(self, batch: Batch, encoded: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """(A, D) hidden states of the untouched model that say the answers. Where merger or pruners are guided also, by
        the layer from which on a token may be missing, -1 for the merger: (B, V) how much each vision token matters.

        That is the slope of the answers' margins, were the token seen a little more or less by all: its size, whatever
        its sign. By its sign a choice is worse than a random one: what distracts a little now is what is counted next.
        """
        inner, m = self.model.model, self.config.method
        embeds = inner.get_input_embeddings()(batch.ids)
        features = inner.multi_modal_projector(encoded.tokens[:, encoded.prefix :])
        where = batch.ids == self.model.config.image_token_id
        embeds = embeds.masked_scatter(where.unsqueeze(-1), features.to(embeds.dtype))
        if not (m.merge_guide_weight or m.prune_guide_weight):
            out = inner.language_model(inputs_embeds=embeds, attention_mask=batch.mask, use_cache=False)
            return answer_positions(out.last_hidden_state, batch.answers), {}
        states, slopes = answer_slopes(self.model, embeds, batch)
        slopes = slopes[:, where].view(len(slopes), len(batch.ids), -1)
        return states, {layer: slopes[max(layer, 0) :].sum(dim=0).abs() for layer in (-1, *self.pruners.layers)}

    def _student(self, batch: Batch, encoded: Any, merged: int) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """(A, D) hidden states of the pruned model that say the answers; and by layer, -1 for the merger, the scores
        (B, n) of the vision tokens that came to it, and their numbers (B, n). The merger's scores are (I, N).
        """
        handle = self.soft(batch.prompt(), merged)
        with handle:
            out = self.model.model(
                input_ids=batch.ids, attention_mask=batch.mask, mm_encoder_outputs={"image": encoded}, use_cache=False
            )
            assert handle.last is not None
            vision = self.sizes.patches * len(encoded.tokens) // len(batch.ids)
            scored, kept = {}, torch.arange(vision, device=batch.ids.device).expand(len(batch.ids), -1)
            for layer, (reduction,) in sorted(handle.last.reductions.items()):
                assert reduction.scores is not None
                scored[layer] = reduction.scores, kept
                kept = handle.last.kept[layer]
        return answer_positions(out.last_hidden_state, batch.answers), scored

    def _guides(
        self, matters: dict[int, Tensor], scored: dict[int, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """How far the merger's scores, and on average each pruner's, are from how much the tokens matter."""
        m, merged, pruned = self.config.method, None, []
        for layer, (scores, numbers) in scored.items():
            if layer < 0 and m.merge_guide_weight:
                merged = guide_loss(scores, matters[layer].view(scores.shape))
            elif layer >= 0 and m.prune_guide_weight:
                pruned.append(guide_loss(scores, matters[layer].gather(1, numbers)))
        return merged, torch.stack(pruned).mean() if pruned else None

    # -- what the loop calls ----------------------------------------------------------------------------------------

    def batches(self, start: int) -> Iterator[Batch]:
        size, step = self.config.dl.batch_size, start
        own = own_part(range(size), "batch_size")
        while True:
            yield self.questions.batch(step, size, slice(own[0], own[-1] + 1))
            step += 1

    def step(self, batch: Batch, step: int) -> Step:
        m = self.config.method
        self.model.to(batch.ids.device)
        self.merger.temperature = temperature_at(
            step, self.steps, m.temperature, m.temperature_min, m.temperature_anneal_rate
        )
        with torch.no_grad():
            encoded = encode(self.model.model, batch.pixels.to(self.model.dtype))
        wanted = m.adv_loss_weight or m.distill_loss_weight or m.merge_guide_weight or m.prune_guide_weight
        real, matters = self._teacher(batch, encoded) if wanted else (None, {})
        fake, scored = self._student(batch, encoded, self.merged_at(step))
        logits = self.model.lm_head(fake)
        share = own_share(len(fake))  # what is a mean over answers' tokens, of which processes have different numbers
        losses = {"task_loss": share * task_loss(logits, batch.answers)}
        total = m.task_loss_weight * losses["task_loss"]
        if real is not None and m.distill_loss_weight:
            losses["distill_loss"] = share * distill_loss(logits, self.model.lm_head(real))
            total = total + m.distill_loss_weight * losses["distill_loss"]
        scalars: dict[str, Any] = {"temperature": self.merger.temperature}
        found: dict[str, Tensor] = {}
        if real is not None and m.adv_loss_weight:
            found[_DISCRIMINATOR], adversarial, more = self._against(real, fake, step, share)
            losses["adv_loss"] = adversarial
            total = total + m.adv_loss_weight * adversarial
            scalars |= more
        found[merging.PART] = found[pruning.PART] = total
        merge_guide, prune_guide = self._guides(matters, scored)
        if -1 in scored:
            losses["merge_sparsity_loss"] = self.merger.sparsity(scored[-1][0])
            found[merging.PART] = total + m.merge_sparsity_weight * losses["merge_sparsity_loss"]
        if merge_guide is not None:
            losses["merge_guide_loss"] = merge_guide
            found[merging.PART] = found[merging.PART] + m.merge_guide_weight * merge_guide
        if prune_guide is not None:
            losses["prune_guide_loss"] = prune_guide
            found[pruning.PART] = total + m.prune_guide_weight * prune_guide
        scalars = average_numbers(scalars | losses)
        self.done = step + 1
        self._log(step, scalars)
        return Step(found, scalars)

    def _against(self, real: Tensor, fake: Tensor, step: int, share: float) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The discriminator's loss, the loss of those who want to fool it, and its figures, all times `share`."""
        seed = self.config.dl.seed * 1_000_003 + step  # all processes start anew at the same steps, alike
        if float(torch.rand((), generator=torch.Generator().manual_seed(seed))) < self.config.method.disc_reinit_prob:
            self.discriminator.start_anew(self.optimisers[_DISCRIMINATOR], seed)
        seen = self.discriminator(torch.cat([real, fake.detach()])).chunk(2)
        real_loss, fake_loss = discriminator_losses(*seen)
        figures = {
            "real_loss": real_loss, "fake_loss": fake_loss,
            "disc_prob_real": seen[0].sigmoid().mean(), "disc_prob_fake": seen[1].sigmoid().mean(),
        }  # fmt: skip
        return (
            share * (real_loss + fake_loss),
            share * adversarial_loss(self.discriminator(fake)),
            {name: share * value.detach() for name, value in figures.items()},
        )

    def validate(self) -> Validation:
        """Accuracy untouched, as trained (soft) and as used (hard), on questions that training never shows."""
        every = self.questions.held_back(4 * self.config.dl.batch_size)
        own = [self._evaluate(batch.to(self.model.device)) for batch in islice(every, rank(), None, world_size())]
        found = gather_in_turn(own)  # each batch by one process
        accuracy = {
            name: float(torch.tensor([good for batch in found for good in batch[name]]).float().mean())
            for name in ("baseline", "soft", "hard") if name in found[0]
        }  # fmt: skip
        if self._baseline is None:
            self._baseline = accuracy.pop("baseline")
        saved = [value for batch in found for value in batch["saved"]]
        metrics = {
            "accuracy_baseline": self._baseline,
            **{f"accuracy_{name}": value for name, value in accuracy.items()},
            "keep_ratio_merge": self.sizes.merged / self.sizes.patches,
            "avg_original_tokens": float(self.sizes.patches),
            "avg_merged_tokens": float(self.sizes.merged),
            "avg_layer_tokens": sum(self._layers()) / self.sizes.depth,
            "flops_saved": sum(saved) / len(saved),
        }  # fmt: skip
        if rank() == 0:
            self._write_parts()
        self._tell(f"[Eval Step {self.done}]\n" + "\n".join(f"  - {k}: {v:.4g}" for k, v in metrics.items()), say=False)
        self.health.evaluated(self.done, metrics)
        return Validation(metrics["accuracy_hard"], metrics)

    def _evaluate(self, batch: Batch) -> dict[str, list[Any]]:
        """Which questions of a batch are answered rightly: untouched (once a run), as used, as trained; MACs saved."""
        found: dict[str, list[Any]] = {}
        if self._baseline is None:
            found["baseline"] = answered(self.model, batch).tolist()
        handle = self.hard()
        with handle:
            found["hard"] = answered(self.model, batch).tolist()
            found["saved"] = [self._saved(handle)]
        encoded = encode(self.model.model, batch.pixels.to(self.model.dtype))
        logits = self.model.lm_head(self._student(batch, encoded, self.sizes.merged)[0])
        found["soft"] = all_right(logits.argmax(-1), batch.answers).tolist()
        return found

    def _layers(self) -> list[int]:
        return tokens_per_layer(self.sizes.merged, self.sizes.depth, self.pruners.layers, self.pruners.keep)

    def _saved(self, handle: VlmAttachment) -> float:
        """The share of the language model's prefill MACs that is gone, merger and pruners counted."""
        cost, text = handle.cost(), handle.stats.text_of_prompts
        own = own_macs(self.merger, self.pruners, self.sizes, self._layers(), round(sum(text) / len(text)))
        return 1.0 - (cost.macs + own) / cost.macs_full

    def facts(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json", exclude={"output_dir", "manager_settings", "search_settings"})
        return {"config": config, "data": self.questions.facts()}

    # -- what is written --------------------------------------------------------------------------------------------

    def _about(self, *names: str) -> dict[str, str]:
        shapes = {merging.PART: self.merger.shape(), pruning.PART: self.pruners.shape()}
        facts = {"model": self.config.backbone_settings.name, "step": self.done, "config": self.facts()["config"]}
        return about_adapter({name: shapes.get(name, {}) for name in names}, facts)

    def export(self, path: Path) -> None:
        """Merger and pruners in one file, for `two_stage` with adapter=."""
        parts = {merging.PART: self.merger, pruning.PART: self.pruners}
        save_tensors(path, adapter_tensors(parts), self._about(*parts))

    def _write_parts(self) -> None:
        """Each part by itself, by step."""
        for name, part in self.modules.items():
            path = self.folder / "checkpoints" / f"{name}_step_{self.done}.safetensors"
            save_tensors(path, adapter_tensors({name: part}), self._about(name))

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.health.step(values)
        if step % 10 == 0 or step + 1 == self.steps:
            groups = {
                merging.PART: ("merge_sparsity_loss", "merge_guide_loss"),
                pruning.PART: ("adv_loss", "task_loss", "distill_loss", "prune_guide_loss"),
                _DISCRIMINATOR: ("real_loss", "fake_loss", "disc_prob_real", "disc_prob_fake"),
            }  # fmt: skip
            lines = [f"[Step {step}] Temperature: {values['temperature']:.3f} Losses:"]
            for group, names in groups.items():
                here = [f"    - {name}: {values[name]:.4f}" for name in names if name in values]
                lines += [f"  {group}:", *here] if here else []
            self._tell("\n".join(lines), say=False)

    def _tell(self, line: str, say: bool = True) -> None:
        """Into training.log; and, where `say`, to the user."""
        if rank() == 0:
            path = self.folder / "logs" / "training.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}\n")
            if say:
                self.warn(line)


def all_right(said: Tensor, answers: Tensor) -> Tensor:
    """(B,) bool: rows whose answer's tokens (B, T) were all said; said: (A,) in the answers' order, -100 left out."""
    asked = answers != -100
    wrong = torch.zeros_like(asked)
    wrong[asked] = said != answers[asked]
    return ~wrong.any(dim=1)


def answered(model: Any, batch: Batch) -> Tensor:
    """(B,) bool: whether the model, as it is, gives the whole answer: prompt first, then the answer on its cache, so
    that what selects tokens sees the prompt alone. The same as greedy generation being right.
    """
    split = batch.prompt_length
    first = model(
        input_ids=batch.ids[:, :split], attention_mask=batch.mask[:, :split], pixel_values=batch.pixels.to(model.dtype),
        use_cache=True,
    )  # fmt: skip
    said = [first.logits[:, -1:].argmax(-1)]
    if batch.answers.shape[1] > 1:
        rest = model(
            input_ids=batch.ids[:, split:-1], attention_mask=batch.mask[:, :-1], past_key_values=first.past_key_values,
            use_cache=True,
        )  # fmt: skip
        said.append(rest.logits.argmax(-1))
    return all_right(torch.cat(said, dim=1)[batch.answers != -100], batch.answers)


# -- the run -----------------------------------------------------------------------------------------------------------


def _questions(config: VlmConfig, processor: Any) -> Questions:
    data = config.dataset_settings
    if data.train == data.val == GENERATED:
        if "user:" not in processor.tokenizer.get_vocab():
            raise DataError("dataset_settings: generated questions are for the small model; name JSONL files")
        return GeneratedQuestions(processor, data.questions, data.val_questions, config.dl.seed)
    if not data.train or not data.val:
        raise DataError("no data: give dataset_settings.train=FILE.jsonl and dataset_settings.val=FILE.jsonl")
    return FileQuestions(processor, data.train, data.val, config.dl.seed, config.method.image_max_size)


def build_task(config: VlmConfig) -> VlmTask:
    """Load the model, read the data. Everything that can be wrong is wrong now."""
    model, processor = load_backbone(config)
    return VlmTask(config, model, _questions(config, processor))


def plan_only(config: VlmConfig) -> Plan:
    """The plan of a run whose model need not be here: from its configuration alone, where that is known."""
    model = empty_model(config)
    if model is None:
        return task_plan(build_task(config))
    sizes, data = sizes_of(config, model), config.dataset_settings
    steps, said = None, "none named: give dataset_settings.train and dataset_settings.val"
    if data.train and data.val:
        questions = FileQuestions(None, data.train, data.val, config.dl.seed, config.method.image_max_size)
        steps = config.dl.epochs * math.ceil(len(questions) / config.dl.batch_size)
        said = f"{data.train}, {len(questions)} questions"
    return make_plan(config, model, sizes, build_networks(config, sizes), steps, said)


def task_plan(task: VlmTask) -> Plan:
    data = task.config.dataset_settings
    batch = task.questions.batch(0, 8)
    text = round(float(batch.mask[:, : batch.prompt_length].sum()) / len(batch.ids)) - task.sizes.patches
    said = f"{data.train}, {len(task.questions)} questions"
    networks = (task.merger, task.pruners)
    return make_plan(task.config, task.model, task.sizes, networks, task.steps, said, text if text > 0 else TEXT)


def train_vlm(
    config: VlmConfig,
    *,
    resume: bool = False,
    task: VlmTask | None = None,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda step: None,
) -> FitResult:
    """A whole run, into config.output_dir. What it learned is best.safetensors, chosen by accuracy_hard."""
    task = task or build_task(config)
    d = config.dl
    settings = FitConfig(
        steps=task.steps, warmup=min(d.warmup_steps, task.steps), clip=d.clip_grad, validate_every=d.eval_every,
        checkpoint_every=d.checkpoint_every, seed=d.seed, precision=d.precision,
    )  # fmt: skip
    task.warn = tell
    task.health.start()
    try:
        return fit(task, settings, Path(config.output_dir), resume=resume, tell=tell, tick=tick)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's has no class of its own
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise OptionError(_memory(config)) from None


def _memory(config: VlmConfig) -> str:
    m = config.method
    return (
        f"out of memory: lower batch_size (now {config.dl.batch_size}) first; then max_vision_tokens (now "
        f"{m.max_vision_tokens or 'any'}) or image_max_size (now {m.image_max_size or 'any'}), where the model's "
        "images differ in size"
    )
