"""A padded trainer of plain Hugging Face and torch: it replays what a run sampled and comes to that run's weights.

Written apart from Trimtab's `learn` and `update`, from the papers, for reading and not for speed: padded batches in float64, all
of an update in one forward pass, torch.optim.AdamW.

Legend: B sequences, P positions of a padded batch less one (position p predicts token p + 1), V words.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from replica.record import Completion, Weights
from replica.rewards import Groups, of_tokens, shaped, usable
from replica.settings import complete


@dataclass
class Padded:
    """Sequences in one rectangle."""

    tokens_BP: torch.Tensor
    attention_BP: torch.Tensor
    mask_BP: torch.Tensor
    """Positions whose next token was drawn by the model."""

    @classmethod
    def of(cls, completions: list[Completion]) -> Padded:
        width = max(len(c.prompt) + len(c.tokens) for c in completions)
        tokens = torch.zeros(len(completions), width, dtype=torch.int64)
        attention, mask = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
        for b, c in enumerate(completions):
            length = len(c.prompt) + len(c.tokens)
            tokens[b, :length] = torch.tensor([*c.prompt, *c.tokens])
            attention[b, :length] = 1
            mask[b, len(c.prompt) : length] = torch.tensor(c.policy_mask)
        return cls(tokens, attention, mask[:, 1:])

    def spread(self, rows: list[list[float]]) -> torch.Tensor:
        """Numbers of the learned tokens in their places."""
        found_BP = torch.zeros(self.mask_BP.shape, dtype=torch.float64)
        found_BP[self.mask_BP] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
        return found_BP


def rate(settings: dict[str, Any], step: int, update: int, peak: float) -> float:
    """Hugging Face's get_scheduler, with a floor."""
    schedule = settings["schedule"]
    per = settings["updates_per_step"] * settings["epochs_per_step"] if schedule["unit"] == "update" else 1
    at, total, warm = step * per + (update if per > 1 else 0), settings["steps"] * per, schedule["warmup_steps"]
    if at < warm:
        return peak * at / warm
    left = (total - at) / (total - warm)
    shape = {"constant": 1.0, "linear": left, "cosine": 0.5 + 0.5 * math.cos(math.pi * (1 - left))}[schedule["kind"]]
    floor = 0.0 if schedule["kind"] == "constant" else schedule["final"]
    return peak * (floor + (1 - floor) * shape)


def adamw(model: torch.nn.Module, settings: dict[str, Any]) -> torch.optim.AdamW:
    how = settings["optimizer"]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": how["weight_decay"]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(how["beta1"], how["beta2"]), eps=how["eps"])


def apply(optimizer: torch.optim.AdamW, settings: dict[str, Any], lr: float) -> None:
    """One step on the gradients that are there."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    if settings["max_grad_norm"] is not None:
        torch.nn.utils.clip_grad_norm_(
            [p for g in optimizer.param_groups for p in g["params"]], settings["max_grad_norm"]
        )
    optimizer.step()
    optimizer.zero_grad()


class Critic(torch.nn.Module):
    """One number a position, 0 at first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = copy.deepcopy(model).model
        self.value_head = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: Padded) -> torch.Tensor:
        hidden = self.body(input_ids=batch.tokens_BP, attention_mask=batch.attention_BP).last_hidden_state
        return self.value_head(hidden)[:, :-1, 0]

    def weights(self) -> Weights:
        found = {f"model.{name}": p.detach() for name, p in self.body.named_parameters()}
        return found | {f"value_head.{name}": p.detach() for name, p in self.value_head.named_parameters()}


class Replica:
    """A run in the making."""

    def __init__(self, model: Any, learn: dict[str, Any], parts: list[dict[str, Any]], adapters: bool = False) -> None:
        self.settings, self.parts, self.model = complete(learn), parts, model
        self.optimizer = adamw(model, self.settings)
        self.coef = self.settings["kl"]["coef"]
        self.reference = copy.deepcopy(model) if self.coef else None
        if self.reference is not None and adapters:
            self.reference = self.reference.unload()
        self.critic = Critic(model) if self.settings["advantage"] == "gae" else None
        self.critic_optimizer = None if self.critic is None else adamw(self.critic, self.settings)
        self.at = 0

    def logprobs(self, model: Any, batch: Padded) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each next token, and the entropy there: [B, P] each."""
        logits_BPV = model(input_ids=batch.tokens_BP, attention_mask=batch.attention_BP).logits[:, :-1]
        logp_BPV = (logits_BPV / self.settings["sampling"]["temperature"]).log_softmax(-1)
        entropy_BP = -(logp_BPV.exp() * logp_BPV).sum(-1)
        return logp_BPV.gather(-1, batch.tokens_BP[:, 1:, None])[..., 0], entropy_BP

    def step(self, sampled: Groups) -> None:
        """Everything that a step of the run learned."""
        settings, step = self.settings, self.at
        self.at += 1
        groups = usable(sampled, settings, self.parts)
        flat = [c for group in groups for c in group]
        if not any(self.included(c) for c in flat):
            return
        batch = Padded.of(flat)
        facts = self.facts(groups, batch)
        first_kl = None
        numbers = np.split(np.arange(len(flat)), np.cumsum([len(g) for g in groups])[:-1])
        updates = settings["updates_per_step"]
        for epoch in range(settings["epochs_per_step"]):
            for number, part in enumerate(np.array_split(np.arange(len(groups)), min(updates, len(groups)))):
                rows = [int(b) for g in part for b in numbers[g] if self.included(flat[b])]
                if not rows:
                    continue
                at = epoch * updates + number
                self.improve_critic([flat[b] for b in rows], rows, facts, step, at)
                if self.critic is not None and step < settings["critic"]["warmup_steps"]:
                    continue
                kl = self.improve([flat[b] for b in rows], rows, facts, rate(settings, step, at, settings["lr"]))
                first_kl = kl if first_kl is None else first_kl
        self.steer(first_kl, len(flat))

    def included(self, c: Completion) -> bool:
        return not (self.settings["mask_truncated"] and c.finish == "length")

    @torch.no_grad()
    def facts(self, groups: Groups, batch: Padded) -> dict[str, list[list[float]] | None]:
        """What is fixed before the first update of a step, of each sequence's learned tokens."""
        settings, mask = self.settings, batch.mask_BP
        engine_BP = batch.spread([c.engine for group in groups for c in group])
        old_BP = None
        if settings["updates_per_step"] * settings["epochs_per_step"] > 1:
            old_BP = engine_BP if settings["old_logprobs"] == "engine" else self.logprobs(self.model, batch)[0]
        reference_BP = None if self.reference is None else self.logprobs(self.reference, batch)[0]
        penalty_BP = torch.zeros_like(engine_BP)
        if reference_BP is not None and settings["kl"]["where"] != "loss":
            penalty_BP = self.coef * self.divergence(engine_BP if old_BP is None else old_BP, reference_BP)
        values_BP = None if self.critic is None else self.critic(batch)
        advantages_BP, returns_BP = of_tokens(
            settings, shaped(groups, settings, self.parts), penalty_BP, mask, values_BP
        )
        names = {
            "engine": engine_BP, "old": old_BP, "reference": reference_BP, "advantages": advantages_BP, "values": values_BP,
            "returns": returns_BP,
        }  # fmt: skip
        return {
            name: None if found is None else [row[seen].tolist() for row, seen in zip(found, mask)]
            for name, found in names.items()
        }

    def divergence(self, logp: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        d = logp - reference
        return {"k1": lambda: d, "k2": lambda: d**2 / 2, "k3": lambda: torch.exp(-d) + d - 1}[
            self.settings["kl"]["estimator"]
        ]()

    def weights_B(self, lengths: torch.Tensor) -> torch.Tensor:
        """What a token of each sequence of an update weighs."""
        n, how = len(lengths), self.settings["aggregate"]
        if how == "token_mean":
            return torch.full((n,), 1 / float(lengths.sum()), dtype=torch.float64)
        if how == "sequence_mean":
            return 1 / (n * lengths.double())
        return torch.full(
            (n,), 1 / (n * (self.settings["max_new_tokens"] if how == "constant" else 1)), dtype=torch.float64
        )

    def improve(self, completions: list[Completion], rows: list[int], facts: dict[str, Any], lr: float) -> float:
        """One update of the policy; returns the KL to the reference that it began with, a token."""
        batch, settings = Padded.of(completions), self.settings
        mask = batch.mask_BP
        there = {n: None if f is None else batch.spread([f[b] for b in rows]) for n, f in facts.items()}
        logp, entropy = self.logprobs(self.model, batch)
        old = logp.detach() if there["old"] is None else there["old"]
        correction = self.correction(old, there["engine"], mask)
        loss_BP = self.policy_loss(logp, old, there["advantages"], mask, correction)
        kl = 0.0
        if there["reference"] is not None:
            kl_BP = self.divergence(logp, there["reference"])
            kl = float(kl_BP.detach()[mask].mean())
            if settings["kl"]["where"] == "loss":
                loss_BP = loss_BP + self.coef * kl_BP * self.kl_ratio(logp, old, mask)
        loss_BP = loss_BP - settings["entropy_coef"] * entropy
        (self.weights_B(mask.sum(1))[:, None] * loss_BP)[mask].sum().backward()
        apply(self.optimizer, settings, lr)
        return kl

    def kl_ratio(self, logp: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        how = self.settings["kl"]["corrected"]
        if not how:
            return torch.ones_like(logp)
        log_ratio = (logp - old) * mask
        ratio = (log_ratio.sum(1) / mask.sum(1)).exp()[:, None] if how == "sequence" else log_ratio.exp()
        return ratio.detach() if self.settings["kl"]["estimator"] == "k2" else ratio

    def correction(self, old: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        how = self.settings["importance"]
        if how["level"] == "off":
            return torch.ones_like(engine)
        gap = (old - engine) * mask
        weight = gap.exp() if how["level"] == "token" else gap.sum(1, keepdim=True).exp().expand_as(gap)
        return weight.clamp(max=how["cap"]) if how["mode"] == "truncate" else weight * (weight <= how["cap"])

    def policy_loss(
        self, logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, correction: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """[B, P]. Losses of whole sequences are put on each of their tokens so that a weighted sum has the right gradient."""
        kind, low, high = self.settings["loss"], self.settings["clip"]["low"], self.settings["clip"]["high"]
        dual = self.settings["clip"]["dual"]
        if kind == "on_policy":
            return -correction * advantages * logp
        log_ratio = (logp - old) * mask
        if kind == "cispo":
            return -correction * log_ratio.exp().clamp(1 - low, 1 + high).detach() * advantages * logp
        if kind == "clip":
            ratio = log_ratio.exp()
        else:
            ratio = (log_ratio.sum(1) / (mask.sum(1) if kind == "gspo" else 1)).exp()[:, None].expand_as(logp)
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        if dual is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
        if kind == "clip":
            return -correction * objective
        by_token = self.settings["kl"]["where"] == "advantage" or self.settings["importance"]["level"] == "token"
        if by_token:  # GSPO-token: every token has the sequence's ratio, and the gradient of its own log-prob
            assert dual is None
            moves = (ratio * advantages <= ratio.clamp(1 - low, 1 + high) * advantages).detach()
            return -correction * moves * ratio.detach() * advantages * logp
        # The sequence's objective once: GSPO's is a mean over tokens and has the tokens' weight as often as there are tokens.
        return -correction * objective / (1 if kind == "gspo" else mask.sum(1, keepdim=True))

    def improve_critic(
        self, completions: list[Completion], rows: list[int], facts: dict[str, Any], step: int, at: int
    ) -> None:
        if self.critic is None or self.critic_optimizer is None:
            return
        batch, bound = Padded.of(completions), self.settings["critic"]["clip"]
        old, returns = (batch.spread([facts[name][b] for b in rows]) for name in ("values", "returns"))
        values = self.critic(batch)
        loss_BP = (values - returns) ** 2
        if bound is not None:
            loss_BP = torch.maximum(loss_BP, (torch.clamp(values, old - bound, old + bound) - returns) ** 2)
        (self.weights_B(batch.mask_BP.sum(1))[:, None] * loss_BP / 2)[batch.mask_BP].sum().backward()
        apply(self.critic_optimizer, self.settings, rate(self.settings, step, at, self.settings["critic"]["lr"]))

    def steer(self, kl: float | None, samples: int) -> None:
        """Ziegler et al. 2019: the coefficient goes up where the KL is above its target, and down where it is below."""
        how = self.settings["kl"]
        if kl is not None and how["target"] is not None:
            error = min(max(kl / how["target"] - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(samples / how["horizon"], 1)

    def weights(self) -> Weights:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}


def supervised_loss(model: Any, items: list[Any], learn: dict[str, Any]) -> torch.Tensor:
    """Mean over the learned tokens of a step, or over its examples."""
    batch = Padded.of([Completion([], e.tokens, e.learned, [], 0, {}, None, "stop") for e in items])
    logits = model(input_ids=batch.tokens_BP, attention_mask=batch.attention_BP).logits[:, :-1]
    loss_BP = F.cross_entropy(logits.transpose(1, 2), batch.tokens_BP[:, 1:], reduction="none") * batch.mask_BP
    if learn.get("aggregate", "token_mean") == "token_mean":
        return loss_BP.sum() / batch.mask_BP.sum()
    return (loss_BP.sum(1) / batch.mask_BP.sum(1)).mean()


def pair_loss(model: Any, items: list[Any], learn: dict[str, Any]) -> torch.Tensor:
    """Bradley and Terry on the number after each answer's last token."""
    scores = []
    for side in ("better", "worse"):
        rows = [[*pair.prompt, *getattr(pair, side)] for pair in items]
        batch = Padded.of([Completion([], row, [True] * len(row), [], 0, {}, None, "stop") for row in rows])
        hidden = model.body(input_ids=batch.tokens_BP, attention_mask=batch.attention_BP).last_hidden_state
        last = batch.attention_BP.sum(1) - 1
        scores.append(model.value_head(hidden[torch.arange(len(rows)), last])[:, 0])
    better, worse = scores
    margins = torch.tensor([pair.margin for pair in items], dtype=torch.float64)
    return (-F.logsigmoid(better - worse - margins) + learn.get("center", 0.0) * (better + worse) ** 2).mean()


def replay_offline(model: Any, steps: list[list[Any]], learn: dict[str, Any], kind: str) -> Weights:
    """Supervised training or that of a reward model, from the items of each step."""
    settings = complete({**learn, "schedule": {"kind": "cosine", "final": 0.1, **learn.get("schedule", {})}})
    trained = model if kind == "sft" else Critic(model)
    optimizer = adamw(trained, settings)
    for step, items in enumerate(steps):
        (supervised_loss if kind == "sft" else pair_loss)(trained, items, learn).backward()
        apply(optimizer, settings, rate(settings, step, 0, settings["lr"]))
    return trained.weights() if isinstance(trained, Critic) else {n: p.detach() for n, p in model.named_parameters()}
