"""A plan from a config alone and the plan of the run itself are made for the same work."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from trimtab.config.load import Offline, config_from_dict
from trimtab.config.resolved import ResolvedConfig, resolve_config
from trimtab.config.reward_model import PairData, RewardModelConfig
from trimtab.config.schema import Model
from trimtab.config.sft import SftConfig, SftData
from trimtab.plan.source import stated_lengths
from trimtab.plan.work import Lengths, evaluation_job_of, job_of
from trimtab.run.build import load_policy
from trimtab.run.shapes import evaluated_models, loaded_models, shape_of, stated_models

LENGTHS = Lengths(40, 30, 5)


def config_of(folder: Path, *overrides: str) -> ResolvedConfig:
    least: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"train": "a.jsonl"}}
    least |= {"reward": [{"fn": "exact_match"}], "run": {"device": "cpu"}}
    return resolve_config(config_from_dict(least, overrides))


SETTINGS = [
    [],
    ["learn.kl.coef=0.1", "learn.updates_per_step=2", "learn.epochs_per_step=2", "model.dtype=float64"],
    ["model.lora={r: 4}", "learn.kl.coef=0.1", "learn.optimizer.states=8bit"],
    ["learn.algorithm=ppo", "data.eval=b.jsonl", "eval.max_new_tokens=9", "run.kernels=plain"],
]


@pytest.mark.parametrize("overrides", SETTINGS)
def test_plan_and_train_have_the_same_job(model_folder: Path, overrides: list[str]) -> None:
    config = config_of(model_folder, *overrides)
    policy = load_policy(config.model, 0, torch.device("cpu"), config.run.kernels)
    stated = stated_models(config, shape_of(str(model_folder)), cpu=True)
    assert job_of(config, stated, LENGTHS) == job_of(config, loaded_models(config, policy), LENGTHS)


def test_a_job_follows_from_its_config(model_folder: Path) -> None:
    sampled = ["eval.samples_per_prompt=3", "eval.sampling.temperature=1.0", "data.eval=b.jsonl"]
    config = config_of(model_folder, "learn.kl.coef=0.1", "learn.algorithm=ppo", *sampled)
    shape = shape_of(str(model_folder))
    job = job_of(config, stated_models(config, shape, cpu=True), LENGTHS)
    assert (job.longest_prompt, job.typical_prompt, job.completion) == (40, 30, config.learn.max_new_tokens)
    assert (job.prompts, job.samples, job.steps) == (32, 16, 100)
    assert job.reference and job.compared and job.critic == shape and job.training and job.generates
    assert (job.eval_sequences, job.eval_completion) == (15, config.learn.max_new_tokens)
    policy = load_policy(config.model, 0, torch.device("cpu"))
    measured = evaluation_job_of(config, evaluated_models(config, policy), LENGTHS)
    assert (measured.prompts, measured.samples, measured.trained) == (5, 3, 0)
    assert (
        not measured.reference and measured.critic is None and measured.eval_sequences == 0 and measured.steps is None
    )


@pytest.mark.parametrize("answers", [1, 2])
def test_both_answers_of_a_pair_are_in_one_micro_batch(model_folder: Path, answers: int) -> None:
    model = Model(path=str(model_folder))
    config = SftConfig(model=model, data=SftData(train="a")) if answers == 1 else _pairs(model)
    shape = shape_of(str(model_folder))
    lengths = stated_lengths(config, shape)
    assert lengths.longest == answers * min(shape.context, 2048) and lengths.held_out == 0
    job = job_of(config, stated_models(config, shape, cpu=True), lengths)
    assert job.completion == lengths.longest - 1 and job.longest_prompt == 1 and job.prompts == 64
    assert not job.generates and not job.old_logprobs and job.training


def _pairs(model: Model) -> Offline:
    return RewardModelConfig(model=model, data=PairData(train="a"))


def test_a_job_is_made_in_one_place() -> None:
    source = Path(trimtab.__file__).parent
    files = [
        file for file in source.rglob("*.py") if "trimtab.plan.job import" in file.read_text()
    ]  # others have other jobs
    made = [
        str(file.relative_to(source))
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Job"
    ]
    assert made == ["plan/work.py"]
