"""The same batch, the same numbers: advantages, losses and gradients equal those of TRL's GRPOTrainer and RLOOTrainer.

trl.safetensors was written by the real TRL (capture_trl.py): one batch that it sampled, and for every case its own advantages,
loss and gradient. Here the same completions and rewards go through Trimtab's own path, groups to samples to packed
micro-batches to the updater, and what comes out is compared. Where the two differ it is by how a loss is normalised, by design,
and by a factor that is stated here:

- A completion that is left out (masked as truncated, or without a reward) counts in no denominator. TRL's grpo and dr_grpo
  divide by all sequences still, so that what is left weighs less.
- A mean over tokens is over all of an optimizer step. TRL's bnpo takes it over each micro-batch, so its loss depends on how the
  batch is cut; with one micro-batch the two are equal, and dapo and cispo are equal however it is cut.
- RLOO's `normalize_advantages` adds 1e-4 to the deviation of leave-one-out advantages, `group_mean_global_std` to that of what
  the groups' means leave, which is (n - 1) / n of it.

TRL's rewards and advantages are float32, old and reference log-probs are here, and norms compute in float32 even in a float64
model: hence the tolerance.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.batch import Sample
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.samples import set_advantages, set_weights, to_samples, usable
from trimtab.update.updater import Updater

FILE = Path(__file__).with_name("trl.safetensors")
TOLERANCE = 2e-6
EOS = 1

LEARN: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, on policy": {},
    "grpo, kl": {"kl": {"coef": 0.1}},
    "grpo, corrected kl": {"kl": {"coef": 0.1, "corrected": True}},
    "grpo, high clip": {"clip": {"low": 0.1, "high": 0.4}},
    "grpo, delta": {"clip": {"dual": 1.5}},
    "grpo, no scale": {"advantage": "group_mean"},
    "grpo, batch scale": {"advantage": "group_mean_batch_std"},
    "grpo, accumulated": {},
    "grpo, truncated": {"mask_truncated": True},
    "grpo, unscorable": {},
    "grpo, two rewards": {},
    "bnpo": {"aggregate": "token_mean"},
    "bnpo, accumulated": {"aggregate": "token_mean"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dr_grpo, kl": {"algorithm": "dr_grpo", "kl": {"coef": 0.05}},
    "dr_grpo, truncated": {"algorithm": "dr_grpo", "mask_truncated": True},
    "dapo": {"algorithm": "dapo"},
    "dapo, accumulated": {"algorithm": "dapo"},
    "dapo, truncated": {"algorithm": "dapo", "mask_truncated": True, "kl": {"coef": 0.1}},
    "dapo, entropy": {"algorithm": "dapo", "entropy_coef": 0.02},
    "cispo": {"algorithm": "cispo", "clip": {"high": 0.3}},  # TRL's epsilon_high is the bound itself: 1.3
    "cispo, kl": {"algorithm": "cispo", "clip": {"high": 0.3}, "kl": {"coef": 0.1}},
    "gspo": {"algorithm": "gspo", "clip": {"low": 3e-2, "high": 4e-2}},
    "gspo, kl and delta": {
        "algorithm": "gspo", "clip": {"low": 3e-2, "high": 4e-2, "dual": 1.1}, "kl": {"coef": 0.1},
    },
    "gspo, corrected kl": {
        "algorithm": "gspo", "clip": {"low": 3e-2, "high": 4e-2}, "kl": {"coef": 0.1, "corrected": "sequence"},
    },
    "rloo": {"algorithm": "rloo"},
    "rloo, high clip": {"algorithm": "rloo", "clip": {"low": 0.1, "high": 0.4}},
    "rloo, normalized": {"algorithm": "rloo", "advantage": "group_mean_global_std"},
    "rloo, clipped rewards": {"algorithm": "rloo", "reward_clip": (-0.5, 1.2)},
}  # fmt: skip
"""The settings of Trimtab that stand for each case's of TRL."""


@cache
def captured() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(FILE, "pt") as file:
        return json.loads(file.metadata()["facts"]), {name: file.get_tensor(name) for name in list(file.keys())}


def policy(weights: str) -> Policy:
    facts, _ = captured()
    model = LlamaForCausalLM(LlamaConfig(**facts["model"])).double()
    load(model, weights)
    return Policy(model)


@torch.no_grad()
def load(model: torch.nn.Module, weights: str) -> None:
    tensors = captured()[1]
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[f"{weights}/{name}"])


def groups_of(name: str) -> list[Group]:
    """What TRL sampled, as Trimtab's engine and scorer would hand it on."""
    facts, _ = captured()
    case, parts, size = facts["cases"][name], facts["rewards"], facts["samples"]
    rewards: list[float | None] = list(parts["spread"])
    if "reward_weights" in case:
        first, second = case["reward_weights"]
        rewards = [first * a + second * b for a, b in zip(parts["spread"], parts["brief"])]
    for place in case.get("unscorable", []):
        rewards[place] = None
    groups = []
    for number in range(len(rewards) // size):
        prompt, made = Prompt(number, "", facts["prompts"][number * size]), []
        for place in range(number * size, (number + 1) * size):
            tokens = torch.tensor(facts["completions"][place])
            finish = "stop" if tokens[-1] == EOS else "length"
            made.append(
                Trajectory(
                    prompt, place, tokens, torch.zeros(len(tokens)), torch.zeros(len(tokens)), finish, reward=rewards[place]
                )
            )  # fmt: skip
        groups.append(Group(prompt, made))
    return groups


def run(name: str, token_budget: int) -> tuple[list[Sample], float, torch.Tensor]:
    """Samples with their advantages, the loss and the gradient (in the order of names) of one update."""
    facts, _ = captured()
    learn = resolve(Learn(**LEARN[name], max_new_tokens=facts["new_tokens"], max_grad_norm=None))
    groups, _ = usable(groups_of(name))
    samples = to_samples(groups)
    flat = [s for group in samples for s in group]
    trained = policy("start")
    sizes = {"token_budget": token_budget, "score_token_budget": 60, "logprob_chunk": 7}
    updater = Updater(trained, PolicyGradient(learn), learn, **sizes, checkpoint_activations=False)
    if not facts["cases"][name].get("on_policy"):
        updater.score(flat, trained, "old_logprobs")
    if learn.kl.coef:
        updater.score(flat, policy("start"), "ref_logprobs")
    set_advantages(groups, samples, learn, learn.kl.coef)
    set_weights([t for group in groups for t in group.trajectories], flat, learn)
    if not facts["cases"][name].get("on_policy"):
        load(trained.model, "moved")
    found: dict[str, torch.Tensor] = {}
    apply = updater.optimizer.apply

    def capture(lr: float) -> Any:
        found.update({n: p.grad.detach().clone() for n, p in trained.model.named_parameters() if p.grad is not None})
        return apply(lr)

    updater.optimizer.apply = capture  # type: ignore[method-assign]
    stats = updater.step(flat, 0.0, learn.kl.coef)
    assert stats.microbatches > 1 or token_budget > 1000
    return flat, float(stats.sums["loss"]), torch.cat([g.flatten() for _, g in sorted(found.items())])


def factor(name: str) -> float:
    """What Trimtab's loss is, by design, times TRL's."""
    trajectories = [t for group in groups_of(name) for t in group.trajectories]
    ended = sum(t.finish != "length" for t in trajectories)
    return {
        "grpo, truncated": len(trajectories) / ended,
        "dr_grpo, truncated": len(trajectories) / ended,
        "grpo, unscorable": len(trajectories) / (len(trajectories) - 1),
        "rloo, normalized": advantage_factor(name),
    }.get(name, 1.0)


def advantage_factor(name: str) -> float:
    if name != "rloo, normalized":
        return 1.0
    rewards = torch.tensor([t.reward or 0.0 for group in groups_of(name) for t in group.trajectories]).view(-1, 4)
    deviation = float((rewards - rewards.mean(1, keepdim=True)).std())
    return (4 / 3 * deviation + 1e-4) / (4 / 3 * (deviation + 1e-4))


EQUAL = [name for name in LEARN if name != "bnpo, accumulated"]


def test_every_captured_case_is_compared() -> None:
    facts, _ = captured()
    assert list(facts["cases"]) == list(LEARN)
    assert facts["versions"]["trl"] == "1.16.0"
    assert len({round(loss, 6) for loss in facts["losses"].values()}) >= 20, "cases that do not differ show nothing"


def test_the_batch_is_one_that_can_tell() -> None:
    """Lengths differ, some completions end by themselves and some do not, and the policy has moved past every bound."""
    facts, _ = captured()
    assert len({len(c) for c in facts["completions"]}) >= 4 and len({len(p) for p in facts["prompts"]}) == 4
    ended = [c[-1] == EOS for c in facts["completions"]]
    assert any(ended) and not all(ended)
    _, _, on_policy = run("grpo, on policy", 10_000)
    _, _, clipped = run("grpo", 10_000)
    assert float((on_policy - clipped).norm()) > 0.3 * float(on_policy.norm())


@pytest.mark.parametrize("name", EQUAL)
def test_advantages_are_trls(name: str) -> None:
    expected = captured()[1][f"advantages/{name}"] * advantage_factor(name)
    samples, _, _ = run(name, 10_000)
    kept = [place for place, t in enumerate(t for g in groups_of(name) for t in g.trajectories) if t.reward is not None]
    found = torch.stack([s.advantages[0] for s in samples])
    torch.testing.assert_close(found.double(), expected[kept].double(), atol=2e-6, rtol=2e-6)
    assert (expected[[i for i in range(len(expected)) if i not in kept]] == 0).all(), "TRL: advantage 0; here: left out"


@pytest.mark.parametrize("token_budget", [40, 10_000])
@pytest.mark.parametrize("name", EQUAL)
def test_loss_and_gradient_are_trls(name: str, token_budget: int) -> None:
    facts, tensors = captured()
    _, loss, gradient = run(name, token_budget)
    expected = tensors[f"gradient/{name}"] * factor(name)
    assert loss == pytest.approx(facts["losses"][name] * factor(name), abs=TOLERANCE)
    assert float((gradient - expected).abs().max()) < TOLERANCE * max(1.0, float(expected.abs().max()))
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_a_mean_over_each_micro_batch_is_where_the_two_part() -> None:
    """TRL's bnpo gives another loss once the batch is cut; a token mean over the whole update does not."""
    facts, tensors = captured()
    _, loss, gradient = run("bnpo, accumulated", 40)
    assert loss == pytest.approx(facts["losses"]["bnpo"], abs=TOLERANCE)
    assert abs(loss - facts["losses"]["bnpo, accumulated"]) > 100 * TOLERANCE
    assert float((gradient - tensors["gradient/bnpo, accumulated"]).norm()) > 1e-3


def test_log_probs_of_old_and_reference_policy_are_trls() -> None:
    _, tensors = captured()
    groups = groups_of("grpo, kl")
    flat = [s for group in to_samples(groups) for s in group]
    start = policy("start")
    learn = resolve(Learn(**LEARN["grpo, kl"]))
    updater = Updater(
        start,
        PolicyGradient(learn),
        learn,
        token_budget=40,
        score_token_budget=40,
        logprob_chunk=5,
        checkpoint_activations=False,
    )
    updater.score(flat, start, "old_logprobs")
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        for sample, row in zip(flat, tensors[key]):
            found = sample.old_logprobs
            assert found is not None
            torch.testing.assert_close(found.double(), row[: len(found)].double(), atol=TOLERANCE, rtol=0)
