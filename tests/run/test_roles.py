"""The loop talks to four roles and to nothing below; what a Trainer takes and gives can be sent to another process."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config.load import config_from_dict
from trimtab.observe.observer import LocalObserver
from trimtab.reward.scorer import Scorer
from trimtab.rollout.generator import LocalGenerator
from trimtab.run import loop
from trimtab.run.inputs import Inputs
from trimtab.run.roles import Generator, Observer, Rewarder, Session, Trainer
from trimtab.run.session import open_session
from trimtab.update.batch import Sample
from trimtab.update.stats import Applied, PassSettings, Scored, Trained, UpdateStats
from trimtab.update.trainer import LocalTrainer

FIELDS = ("old_logprobs", "ref_logprobs", "values")


def sent(thing: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(thing))


class Elsewhere:
    """A Trainer in another process, as far as that can be told from here: it never sees an object of the caller's."""

    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer

    def score(self, samples: Sequence[Sample], field: str, by: Scored = "policy") -> None:
        theirs = sent(list(samples))
        self.trainer.score(theirs, field, by)
        for sample, other in zip(samples, sent(theirs)):
            setattr(sample, field, getattr(other, field))

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0, model: Trained = "policy") -> UpdateStats:
        return sent(self.trainer.accumulate(sent(list(samples)), kl_coef, model))

    def apply(self, lr: float, model: Trained = "policy") -> Applied:
        return sent(self.trainer.apply(lr, model))

    def place_of(self, model: Scored) -> int:
        return sent(self.trainer.place_of(model))

    @property
    def begun(self) -> int:
        return self.trainer.begun

    @property
    def settings(self) -> PassSettings:
        return sent(self.trainer.settings)

    def end_step(self) -> dict[str, float]:
        return sent(self.trainer.end_step())

    def adapt(self, metrics: Mapping[str, float]) -> None:
        self.trainer.adapt(sent(dict(metrics)))

    def memory(self) -> dict[str, Any]:
        return sent(self.trainer.memory())

    def save(self, folder: Path, state: Any, keep: int, files: Mapping[str, bytes]) -> None:
        self.trainer.save(folder, sent(state), keep, sent(files))

    def settle_saves(self, wait: bool = True) -> None:
        self.trainer.settle_saves(wait)

    def export(self, folder: Path, scores: Mapping[str, Any] | None = None) -> None:
        self.trainer.export(folder, sent(scores))


def run(model_folder: Path, folder: Path, elsewhere: bool, **learn: Any) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Weights after two steps, and their metrics."""
    tree = {
        "model": {"path": str(model_folder)},
        "data": {"train": "object:rows", "task": "kind"},
        "reward": [{"fn": "object:reward"}],
        "learn": {
            "steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "updates_per_step": 2, "lr": 1e-2,
            "kl": {"coef": 0.1, "target": 1e-3}, **learn,
        },
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1},
        "observe": {"dir": str(folder), "tensorboard": False, "checkpoint_every": 0},
    }  # fmt: skip
    found: list[dict] = []
    inputs = Inputs(
        train_rows=[{"prompt": f"{a}+1=", "kind": "even" if a % 2 else "odd"} for a in range(8)],
        rewards={"reward": lambda completions, **_: [len(set(text)) / 10 for text in completions]},
        callbacks=[lambda step, metrics: found.append(dict(metrics))],
    )
    with ExitStack() as stack:
        session = open_session(config_from_dict(tree), inputs, stack)
        trainer = session.trainer
        assert isinstance(trainer, LocalTrainer)
        if elsewhere:
            session.trainer = Elsewhere(trainer)
        loop.train(session)
        weights = {name: p.detach().clone() for name, p in trainer.updater.policy.model.named_parameters()}
    unlike = ("time/", "memory/", "throughput/", "rollout/", "reward/latency", "update/")
    return weights, [{k: v for k, v in row.items() if not k.startswith(unlike)} for row in found]


@pytest.mark.parametrize("learn", [{}, {"algorithm": "ppo"}], ids=["grpo", "ppo"])
def test_a_trainer_needs_no_object_of_the_loops(model_folder: Path, tmp_path: Path, learn: dict[str, Any]) -> None:
    """KL by task needs the samples that it is of; those are the loop's own."""
    here, rows = run(model_folder, tmp_path / "here", False, **learn)
    there, others = run(model_folder, tmp_path / "there", True, **learn)
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert rows == others and "policy/task/odd/kl_ref" in rows[0]


def test_the_loop_fits_on_a_page_and_a_half_and_imports_nothing_below_the_roles() -> None:
    source = Path(loop.__file__).read_text()
    assert len(source.splitlines()) <= 120
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("trimtab.")} == {
        "trimtab.run.finish_step",
        "trimtab.run.evaluation",
        "trimtab.run.save_on_stop",
        "trimtab.run.roles",
        "trimtab.run.update_step",
    }
    assert len(Session.__dataclass_fields__) == 9


@pytest.mark.parametrize(
    ("role", "local"),
    [(Trainer, LocalTrainer), (Generator, LocalGenerator), (Rewarder, Scorer), (Observer, LocalObserver)],
)
def test_every_role_has_a_local_implementation(role: type, local: type) -> None:
    """mypy compares their types where a Session is made; here, that no name is missing."""
    asked = {name for name in vars(role) if not name.startswith("_")} | set(role.__annotations__)
    there = set(dir(local)) | {"names", "stats", "apart"}  # set when one is made
    assert asked <= there
