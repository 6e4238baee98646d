"""PPO's critic: values and gradients by hand, whatever the budget; and what a run with one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCABULARY, tiny_model

import trimtab
from tests import running
from tests.running import letters
from trimtab.base.errors import ConfigError, ModelError
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.batch import Sample
from trimtab.update.critic import open_critic
from trimtab.update.objectives.values import Values
from trimtab.update.samples import set_advantages
from trimtab.update.updater import Updater


def samples(count: int = 6, dtype: torch.dtype = torch.float64) -> list[Sample]:
    g = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        length = 2 + 3 * number % 7
        prompt = torch.randint(
            3, VOCABULARY, (4 + number // 2,), generator=torch.Generator().manual_seed(number // 2)
        ).tolist()
        found.append(
            Sample(
                prompt,
                torch.randint(3, VOCABULARY, (length,), generator=g),
                advantages=torch.zeros(length),
                weights=torch.full((length,), 1 / 40, dtype=dtype),
                engine_logprobs=torch.zeros(length),
                values=torch.randn(length, generator=g, dtype=dtype),
                returns=torch.randn(length, generator=g, dtype=dtype),
            )
        )
    return found


def critic_of(budget: int, architecture: str = "qwen2", **settings: Any) -> Updater:
    learn = resolve(Learn(algorithm="ppo", max_grad_norm=None, critic=settings))
    made = open_critic(
        Policy(tiny_model(architecture, torch.float64)), learn, token_budget=budget, score_token_budget=budget,
        checkpoint_activations=False, logprob_chunk=64,
    )  # fmt: skip
    with torch.no_grad():
        made.objective.head.weight.copy_(
            0.3 * torch.randn(made.objective.head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
        made.objective.head.bias.fill_(0.1)
    return made


def values_by_hand(made: Updater, sample: Sample) -> torch.Tensor:
    """From transformers' own forward, one whole sequence at a time."""
    tokens = torch.tensor([[*sample.prompt_tokens, *sample.tokens.tolist()]])
    hidden = made.policy.model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    start = len(sample.prompt_tokens) - 1
    return made.objective.head(hidden[start:-1]).squeeze(-1)


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_values_are_those_of_the_state_before_each_token(budget: int, architecture: str) -> None:
    batch, made = samples(), critic_of(budget, architecture)
    made.policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [values_by_hand(made, sample) for sample in batch]
    made.policy.model.set_attn_implementation("trimtab")
    made.score(batch, made.policy, "values")
    for sample, wanted in zip(batch, expected):
        torch.testing.assert_close(sample.values, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_gradient_is_that_worked_by_hand_whatever_the_budget(clip: float | None) -> None:
    batch, found = samples(), []
    for budget in (14, 40, 4096):
        made = critic_of(budget, clip=clip)
        grads: dict[str, torch.Tensor] = {}
        lay_out = made.optimizer._lay_out_gradients

        def capture(made: Updater = made, grads: dict = grads, lay_out: Any = lay_out) -> None:
            trained = [(name, p) for name, p in made.policy.model.named_parameters() if p.requires_grad]
            for (name, _), grad in zip(trained, made.optimizer.grads()):
                if grad is not None:
                    grads[name] = grad.clone()
            lay_out()

        made.optimizer._lay_out_gradients = capture
        made.step(batch, 1e-3, 0.0)
        found.append(grads)
    reference = critic_of(4096, clip=clip)
    reference.policy.model.set_attn_implementation("eager")
    loss = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        values = values_by_hand(reference, sample)
        errors = (values - sample.returns).square()
        if clip is not None:
            near = torch.minimum(torch.maximum(values, sample.values - clip), sample.values + clip)
            errors = torch.maximum(errors, (near - sample.returns).square())
        loss = loss + (sample.weights * errors).sum() / 2
    loss.backward()
    expected = {name: p.grad for name, p in reference.policy.model.named_parameters() if p.grad is not None}
    assert "value_head.weight" in expected and len(expected) > 10
    for grads in found:
        assert grads.keys() == expected.keys()
        for name, wanted in expected.items():
            torch.testing.assert_close(grads[name], wanted, rtol=1e-3, atol=1e-6)


def test_advantages_are_gae_over_each_sequence_normalised_over_the_step() -> None:
    batch = samples(4)
    trajectories = [
        Trajectory(
            prompt=None, sample=i, tokens=s.tokens, logprobs=torch.zeros(len(s.tokens)),
            versions=torch.zeros(len(s.tokens), dtype=torch.int32), finish="stop", reward=float(i),
        )
        for i, s in enumerate(batch)
    ]  # fmt: skip
    for sample in batch:
        sample.ref_logprobs = torch.full((len(sample.tokens),), -0.5)
    learn = resolve(
        Learn(
            algorithm="ppo", kl={"coef": 0.1, "where": "reward", "estimator": "k1"}, critic={"lam": 0.9, "gamma": 0.99}
        )
    )
    set_advantages([Group(None, trajectories)], [batch], learn, 0.1)
    raw = []
    for i, sample in enumerate(batch):
        earned = [-0.1 * 0.5] * len(sample.tokens)  # k1 is log pi - log ref = 0 - (-0.5)
        earned[-1] += i
        advantage, following, out = 0.0, 0.0, []
        for t in reversed(range(len(earned))):
            delta = earned[t] + 0.99 * following - float(sample.values[t])
            advantage = delta + 0.99 * 0.9 * advantage
            following = float(sample.values[t])
            out.insert(0, advantage)
        raw.append(torch.tensor(out, dtype=torch.float64))
        torch.testing.assert_close(sample.returns.double(), raw[-1] + sample.values, rtol=1e-5, atol=1e-5)
    everything = torch.cat(raw)
    for sample, own in zip(batch, raw):
        wanted = (own - everything.mean()) / (everything.std() + 1e-4)
        torch.testing.assert_close(sample.advantages.double(), wanted, rtol=1e-4, atol=1e-5)


ROWS = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(5)]


LEARN = {
    "algorithm": "ppo",
    "steps": 3,
    "prompts_per_step": 8,
    "samples_per_prompt": 2,
    "max_new_tokens": 8,
    "lr": 1e-3,
}


def train(
    model: Path | dict[str, Any], tmp_path: Path, name: str = "run", **changes: Any
) -> tuple[Path, list[dict[str, Any]]]:
    run = running.train(model, tmp_path / name, {"data": ROWS, "reward": letters, "learn": LEARN}, changes)
    return run.folder, run.metrics


def test_it_learns_and_the_critic_comes_to_know_what_will_be_earned(model_folder: Path, tmp_path: Path) -> None:
    learn = {"steps": 40, "lr": 1e-3, "critic": {"lr": 1e-2}, "samples_per_prompt": 4}
    _, metrics = train(model_folder, tmp_path, learn=learn)
    explained = [row["value/explained_variance"] for row in metrics]
    assert sum(explained[-20:]) / 20 > 0.1 > sum(explained[:2]) / 2
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 1.0
    assert {"value/loss", "value/mean", "value/clip_fraction", "value/grad_norm"} <= metrics[-1].keys()


def test_the_policy_stays_while_the_critic_warms_up(model_folder: Path, tmp_path: Path) -> None:
    folder, metrics = train(
        model_folder,
        tmp_path,
        learn={"steps": 3, "critic": {"warmup_steps": 2}},
        observe={"checkpoint_every": 1, "keep_checkpoints": 3},
    )
    before = load_file(model_folder / "model.safetensors")
    for step, same in ((1, True), (2, True), (3, False)):
        after = load_file(folder / "checkpoints" / f"step-{step}" / "model.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before) is same
    assert ["policy/loss" in row for row in metrics] == [False, False, True]
    assert all("value/loss" in row for row in metrics)


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_resumed_run_ends_with_the_same_weights_and_the_same_critic(
    lora: dict | None, model_folder: Path, tmp_path: Path
) -> None:
    model = {"path": str(model_folder), **({"lora": lora} if lora else {})}
    whole, _ = train(model, tmp_path, "whole", learn={"steps": 4})
    train(model, tmp_path, "part", learn={"steps": 2})
    part, _ = train(model, tmp_path, "part", learn={"steps": 4}, resume=True)
    for name in (
        "final/model.safetensors",
        "checkpoints/step-4/critic.safetensors",
        "checkpoints/step-4/critic_optimizer.safetensors",
    ):
        one, two = load_file(whole / name), load_file(part / name)
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), name
    critic = load_file(part / "checkpoints" / "step-4" / "critic.safetensors")
    assert any("lora_" in name for name in critic) is bool(lora) and "value_head.weight" in critic


def test_how_it_runs_does_not_change_what_is_learned(model_folder: Path, tmp_path: Path) -> None:
    model = {"path": str(model_folder), "dtype": "float64"}
    one, _ = train(model, tmp_path, "one")
    two, _ = train(model, tmp_path, "two", run={"token_budget": 24, "checkpoint_activations": True})
    first, second = (load_file(folder / "checkpoints" / "step-3" / "critic.safetensors") for folder in (one, two))
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-6)


def test_a_critic_reads_tokens_as_the_policy_does(model_folder: Path, tmp_path: Path, tokenizer) -> None:
    """Of another tokenizer the same numbers are other words; without one it is believed."""
    other = json.loads((model_folder / "tokenizer.json").read_text())
    words = other["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    save_model(tiny_model("qwen2"), tokenizer, tmp_path / "critic")
    (tmp_path / "critic/tokenizer.json").write_text(json.dumps(other))
    critic = {"critic": {"path": str(tmp_path / "critic")}}
    with pytest.raises(ConfigError, match=r"learn\.critic\.path: the tokenizer of .*critic differs"):
        train(model_folder, tmp_path, "other", learn=critic)
    for file in (tmp_path / "critic").glob("*token*"):
        file.unlink()
    train(model_folder, tmp_path, "none", learn=critic)
    save_model(tiny_model("qwen2", vocab_size=40), tokenizer, tmp_path / "small")
    with pytest.raises(
        ConfigError, match=r"learn\.critic\.path: .*small has a vocabulary of 40 tokens, fewer than the policy's \d+"
    ):
        train(model_folder, tmp_path, "small-run", learn={"critic": {"path": str(tmp_path / "small")}})


def test_a_critic_that_is_not_there_is_told_under_its_own_key(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^learn\.critic\.path: no model folder at /no/where"):
        train(model_folder, tmp_path, learn={"critic": {"path": "/no/where"}})


def test_a_critic_may_start_from_another_model(model_folder: Path, tmp_path: Path, tokenizer) -> None:
    save_model(tiny_model("qwen2", num_hidden_layers=1), tokenizer, tmp_path / "other")
    folder, _ = train(model_folder, tmp_path, learn={"critic": {"path": str(tmp_path / "other")}})
    critic = load_file(folder / "checkpoints" / "step-3" / "critic.safetensors")
    assert not any("layers.1." in name for name in critic)


@pytest.mark.parametrize(
    ("learn", "says"),
    [
        ({"algorithm": "grpo", "critic": {"lr": 1e-4}}, "learn.critic.lr: has no effect"),
        ({"critic": {"warmup_steps": 3}}, "the policy would never learn"),
        ({"critic": {"lam": 2.0}}, "learn.critic.lam"),
        ({"critic": {"path": "missing"}}, "missing"),
    ],
)
def test_bad_settings_are_refused(learn: dict[str, Any], says: str, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(trimtab.base.errors.TrimtabError) as error:
        train(model_folder, tmp_path, learn=learn)
    assert says in str(error.value)
    assert not (tmp_path / "run").exists()


def test_memory_that_runs_out_in_the_critic_is_survived(
    model_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    plain, _ = train({"path": str(model_folder), "dtype": "float64"}, tmp_path, "plain")
    loss = Values.loss

    def short(self: Values, policy: Policy, batch: Any, *rest: Any, **named: Any) -> torch.Tensor:
        if len(batch.samples) > 4:
            raise torch.OutOfMemoryError("no")
        return loss(self, policy, batch, *rest, **named)

    monkeypatch.setattr(Values, "loss", short)
    other, metrics = train({"path": str(model_folder), "dtype": "float64"}, tmp_path, "other")
    assert metrics[-1]["run/oom_recoveries"] > 0 and "critic: out of memory" in capsys.readouterr().out
    one, two = (load_file(f / "checkpoints" / "step-3" / "critic.safetensors") for f in (plain, other))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)
