"""Contradictions: each is reported where it belongs, with a way out, and what makes sense passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import RECIPES
from trimtab.config.check import contradictions
from trimtab.config.load import config_from_dict, load_as, load_config, resolved_yaml
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

LEAST = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "reward": [{"fn": "exact_match"}]}

CLASHES = [
    ("learn.sampling.temperature", "learn.sampling.temperature=0"),
    ("learn.sampling.temperature", "learn.sampling.temperature=1e-45"),
    ("eval.sampling.temperature", "eval.sampling.temperature=1e-45 data.eval=b.jsonl"),
    ("learn.samples_per_prompt", "learn.samples_per_prompt=1"),
    ("learn.samples_per_prompt", "learn.samples_per_prompt=1 learn.algorithm=rloo"),
    ("learn.samples_per_prompt", "learn.samples_per_prompt=1 learn.algorithm=reinforce learn.advantage=group_mean"),
    ("learn.prompts_per_step", "learn.samples_per_prompt=1 learn.prompts_per_step=1 learn.algorithm=reinforce"),
    ("learn.updates_per_step", "learn.updates_per_step=33"),
    ("learn.loss", "learn.algorithm=reinforce learn.updates_per_step=2"),
    ("learn.loss", "learn.loss=on_policy learn.epochs_per_step=2"),
    ("learn.old_logprobs", "learn.old_logprobs=engine"),
    ("run.offload.activations", "run.offload.activations=true run.checkpoint_activations=some"),
    ("run.offload.reference", "run.offload.reference=true"),
    ("run.kernels", "run.kernels=liger run.device=cpu"),
    ("run.kernels", "run.kernels=native run.device=cpu"),
    ("run.offload.reference", "run.offload.reference=true learn.kl.coef=0.1 model.lora.r=4"),
    ("learn.importance.level", "learn.old_logprobs=engine learn.updates_per_step=2 learn.importance.level=token"),
    ("learn.importance.cap", "learn.importance.cap=3"),
    ("learn.importance.mode", "learn.importance.mode=mask"),
    ("learn.clip.high", "learn.loss=on_policy learn.clip.high=0.3"),
    ("learn.clip.low", "learn.algorithm=reinforce learn.clip.low=0.3"),
    ("learn.clip.dual", "learn.clip.dual=3 learn.algorithm=cispo"),
    ("learn.clip.dual", "learn.clip.dual=3 learn.loss=on_policy"),
    ("learn.kl.target", "learn.kl.target=0.1"),
    ("learn.kl.estimator", "learn.kl.estimator=k1 learn.kl.coef=0.1"),
    ("learn.kl.estimator", "learn.kl.estimator=k2"),
    ("learn.kl.where", "learn.kl.where=reward"),
    ("learn.kl.corrected", "learn.kl.corrected=true"),
    ("learn.kl.corrected", "learn.kl.corrected=true learn.kl.coef=0.1 learn.kl.where=reward"),
    ("learn.kl.horizon", "learn.kl.horizon=5"),
    ("learn.kl.horizon", "learn.kl.horizon=5 learn.kl.coef=0.1"),
    ("learn.dynamic_sampling.enabled", "learn.dynamic_sampling.enabled=true learn.algorithm=reinforce_pp"),
    ("learn.dynamic_sampling.enabled", "learn.algorithm=dapo learn.advantage=batch_mean"),
    ("learn.dynamic_sampling.max_refills", "learn.dynamic_sampling.max_refills=2"),
    ("learn.kl.corrected", "learn.kl.corrected=sequence learn.kl.coef=0.1 learn.kl.where=advantage"),
    ("learn.kl.where", "learn.kl.where=advantage learn.kl.coef=0.1 learn.algorithm=ppo"),
    ("learn.kl.where", "learn.kl.where=advantage learn.kl.coef=0.1 learn.algorithm=reinforce_pp"),
    ("learn.schedule.warmup_steps", "learn.schedule.warmup_steps=10 learn.steps=10"),
    (
        "learn.schedule.warmup_steps",
        "learn.schedule.warmup_steps=20 learn.schedule.unit=update learn.steps=10 learn.updates_per_step=2",
    ),
    ("learn.schedule.unit", "learn.schedule.kind=linear learn.schedule.unit=update"),
    ("learn.schedule.unit", "learn.schedule.unit=update learn.updates_per_step=2"),
    ("learn.schedule.final", "learn.schedule.final=0.1"),
    ("learn.overlong.buffer", "learn.overlong.buffer=512"),
    ("learn.reward_clip", "learn.reward_clip=[1,0]"),
    ("learn.reward_clip", "learn.reward_clip=[1,1]"),
    ("reward", "reward.0.weight=0"),
    ("reward.1.name", "reward.1.fn=mine.py:exact_match"),
    ("reward.1.name", "reward.1.fn=length reward.1.name=exact_match"),
    ("reward.1.name", "reward.0.fn=model:a reward.1.fn=model:b"),
    ("reward.0.timeout_s", "reward.0.fn=model:a reward.0.timeout_s=3"),
    ("reward.0.args", "reward.0.fn=model:a reward.0.args.column=answer"),
    ("reward.0.timeout_s", "environment.fn=a.py:B reward.0.fn=environment reward.0.timeout_s=3"),
    ("eval.part", "reward.0.fn=model:a/b eval.part=a/b data.eval=e.jsonl"),
    ("reward.0.normalize", "reward.0.normalize=group"),
    ("reward.0.normalize", "reward.0.normalize=step reward.1.fn=length reward.1.weight=0"),
    ("reward.1.normalize", "reward.1.fn=length reward.1.normalize=step reward.1.weight=0"),
    (
        "reward.1.normalize",
        "reward.1.fn=length reward.1.normalize=group learn.samples_per_prompt=1 learn.algorithm=reinforce",
    ),
    ("reward.1.args.timeout_s", "reward.1.fn=judge reward.1.args.timeout_s=11"),
    ("data.task", "data.task=prompt"),
    ("data.task", "data.task=''"),
    ("observe.kl_bands", "observe.kl_bands={a:[0.02,0.06]} learn.kl.coef=0.1"),
    ("observe.kl_bands", "observe.kl_bands={a:[0.02,0.06]} data.task=kind"),
    ("observe.kl_bands.a", "observe.kl_bands={a:[0.06,0.02]} data.task=kind learn.kl.coef=0.1"),
    ("eval.part", "eval.part=exact data.eval=b.jsonl"),
    ("eval.limit", "eval.limit=3"),
    ("eval.sampling", "eval.sampling.temperature=1"),
    ("eval.sampling", "eval.sampling.stop=[x]"),
    ("eval.sampling", "eval.sampling.stop=[] eval.sampling.stop_token_ids=[3]"),
    ("observe.eval_every", "observe.eval_every=3"),
    ("eval.samples_per_prompt", "data.eval=b.jsonl eval.samples_per_prompt=4"),
    ("eval.sampling.top_p", "data.eval=b.jsonl eval.sampling.top_p=0.9"),
    ("data.options", "data.options.size=3"),
    ("data.train_split", "data.train_split=validation"),
    ("data.eval_split", "data.eval_split=validation"),
    ("data.train", "data.train=''"),
    ("model.path", "model.path=''"),
    ("observe.dir", "observe.dir=runs/{nme}"),
    ("observe.dir", "observe.dir=runs/{name"),
    ("observe.keep_checkpoints", "observe.keep_checkpoints=5 observe.checkpoint_every=0"),
    ("run.token_budget", "run.token_budget=512"),
    ("run.token_budget", "run.token_budget=1023 data.max_prompt_tokens=512"),
    ("run.score_token_budget", "run.score_token_budget=512"),
    ("run.rollout.kv_memory", "run.rollout.kv_memory=4"),
]

ALLOWED = [
    "learn.samples_per_prompt=1 learn.algorithm=reinforce",
    "learn.samples_per_prompt=1 learn.advantage=global_norm",
    "learn.updates_per_step=32",
    "learn.epochs_per_step=2 learn.old_logprobs=engine",
    "run.offload.activations=true run.checkpoint_activations=true run.offload.optimizer=true",
    "run.offload.reference=true learn.kl.coef=0.1",
    "learn.loss=on_policy learn.clip.low=0.2 learn.clip.high=0.2",
    "learn.clip.dual=3",
    "learn.clip.dual=3 learn.algorithm=dapo",
    "learn.clip.high=0.28",
    "learn.kl.estimator=k1 learn.kl.coef=0.1 learn.kl.where=reward",
    "learn.kl.estimator=k1 learn.kl.coef=0.1 learn.kl.corrected=true",
    "learn.kl.target=0.1 learn.kl.coef=0.1 learn.kl.horizon=5",
    "learn.algorithm=dapo learn.dynamic_sampling.max_refills=2",
    "learn.algorithm=dapo learn.dynamic_sampling.enabled=false learn.advantage=batch_mean",
    "learn.kl.coef=0.1 learn.kl.where=advantage learn.algorithm=rloo",
    "learn.kl.coef=0.1 learn.kl.corrected=sequence learn.algorithm=gspo",
    "learn.schedule.warmup_steps=9 learn.steps=10",
    "learn.schedule.warmup_steps=19 learn.schedule.unit=update learn.steps=10 learn.updates_per_step=2",
    "learn.schedule.final=0.1 learn.schedule.kind=cosine",
    "learn.overlong.buffer=511",
    "learn.importance.level=token learn.importance.cap=5",
    "reward.1.fn=length reward.1.weight=0",
    "reward.0.normalize=group reward.1.fn=length",
    "reward.0.normalize=step reward.1.fn=length reward.1.normalize=group",
    "reward.0.normalize=group learn.overlong.buffer=16",
    "reward.0.normalize=step learn.reward_clip=[-2,2]",
    "reward.0.normalize=step learn.algorithm=ppo",
    "reward.0.normalize=step reward.1.fn=length learn.samples_per_prompt=1 learn.algorithm=reinforce",
    "reward.1.fn=judge reward.1.args.timeout_s=10",
    "data.task=kind",
    "data.task=kind observe.kl_bands={a:[0.02,0.06],b:[0,0.1]} learn.kl.coef=0.1",
    "eval.part=exact_match data.eval=b.jsonl observe.eval_every=5",
    "eval.samples_per_prompt=4 eval.sampling.temperature=1 eval.sampling.top_p=0.9 data.eval=b.jsonl",
    "eval.sampling.stop=[] eval.sampling.stop_token_ids=[] learn.sampling.stop=[x]",
    "data.options.size=3 data.train=task:arithmetic",
    "data.options.size=3 data.eval=reasoning_gym:countdown",
    "data.train=openai/gsm8k:main data.train_split=test",
    "data.train=task:arithmetic data.train_split=test",
    "observe.dir=runs/{name}/{time}",
    "run.token_budget=513",
    "run.token_budget=1024 data.max_prompt_tokens=512",
    "run.score_token_budget=513 run.rollout.prefill_tokens=1 run.rollout.page_tokens=1024",
]


@pytest.mark.parametrize(("where", "overrides"), CLASHES)
def test_a_contradiction_is_reported_once_with_a_fix(where: str, overrides: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(LEAST, overrides.split())
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.fix.startswith(("Write ", "Leave ", "Give ")), problem


@pytest.mark.parametrize("overrides", ALLOWED)
def test_what_makes_sense_passes_and_passes_again_when_every_key_is_written_out(overrides: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    written = resolved_yaml(config_from_dict(LEAST, overrides.split()))
    path.write_text(written)
    assert resolved_yaml(load_config(path)) == written


@pytest.mark.parametrize("algorithm", RECIPES)
def test_every_algorithm_passes_with_its_defaults(algorithm: str) -> None:
    assert contradictions(config_from_dict(LEAST, [f"learn.algorithm={algorithm}"])) == []


def test_the_fix_says_the_number_to_write() -> None:
    with pytest.raises(ConfigError, match=r"Write 1024 or more, or auto"):
        config_from_dict(LEAST, ["run.token_budget=100", "data.max_prompt_tokens=512"])


def test_ignored_keys_silence_what_follows_from_them() -> None:
    config = Config.model_validate(LEAST | {"learn": {"kl": {"estimator": "k2"}}})
    assert [problem.where for problem in contradictions(config)] == ["learn.kl.estimator"]
    for key in ("learn.kl.coef", "learn.kl", "learn", "learn.kl.estimator"):
        assert contradictions(config, ignore=[key]) == []
    assert len(contradictions(config, ignore=["learn.k", "learn.kl.coefficient", "run"])) == 1


@pytest.mark.parametrize("schema", [SftConfig, RewardModelConfig])
@pytest.mark.parametrize(
    "override",
    [
        "observe.max_failed_rewards=0.1",
        "observe.samples_every=3",
        "run.engine=vllm",
        "run.rollout.kv_memory=1GiB",
        "run.rollout.tensor_parallel=2",
        "run.reward_workers=3",
    ],
)
def test_what_only_sampling_has_is_refused_where_nothing_is_sampled_and_is_what_was_given(
    schema: type[SftConfig] | type[RewardModelConfig], override: str
) -> None:
    least = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}}
    with pytest.raises(ConfigError) as caught:
        load_as(schema, None, [override], least)
    (problem,) = caught.value.problems
    assert problem.where == override.partition("=")[0]
    assert problem.what == "has no effect: this stage samples nothing and scores nothing"
    assert load_as(schema, None, ["run.engine=native", "run.reward_workers=auto"], least)
