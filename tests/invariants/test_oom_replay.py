"""Law 8: a step that ran out of memory and recovered is a step that did not: same tokens, same gradient, same weights.

Memory runs out in every phase of a step, and in every micro-batch of the passes that have some, by an error raised where torch
would raise it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from invariants.test_gradient_invariance import WORDS, assert_same_gradient
from safetensors.torch import load_file

from tests import running
from tests.running import letters
from trimtab.base.errors import MemoryExhausted
from trimtab.config.load import config_from_dict
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.record import part
from trimtab.record.checkpoint import load_state, newest_checkpoint
from trimtab.rollout.native.cache import DecodePlan, PrefillPlan
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run import loop
from trimtab.run.inputs import Inputs
from trimtab.run.roles import Session
from trimtab.run.session import open_session
from trimtab.update import export
from trimtab.update.optimizer import MasterAdamW

Inject = Callable[[Session], None]


def short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def at_call(run: Callable[..., Any], number: int, counts: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """`run`, but the number-th call that counts runs out of memory."""
    calls = [0]

    def failing(*arguments: Any, **named: Any) -> Any:
        calls[0] += counts(*arguments)
        if calls[0] == number and counts(*arguments):
            calls[0] += 1
            short()
        return run(*arguments, **named)

    return failing


def in_forward(kind: type, number: int, *, gradient: bool = False) -> Inject:
    def inject(run: Session) -> None:
        def counts(tokens, positions, plan) -> bool:
            return isinstance(plan, kind) and torch.is_grad_enabled() == gradient

        run.trainer.updater.policy.hidden = at_call(run.trainer.updater.policy.hidden, number, counts)

    return inject


def in_reference(number: int) -> Inject:
    def inject(run: Session) -> None:
        run.trainer.reference.hidden = at_call(run.trainer.reference.hidden, number)

    return inject


def in_backward(number: int) -> Inject:
    def inject(run: Session) -> None:
        forward, calls = run.trainer.updater.policy.hidden, [0]

        def hidden(*arguments: Any) -> torch.Tensor:
            out: torch.Tensor = forward(*arguments)
            calls[0] += out.requires_grad
            if out.requires_grad and calls[0] == number:
                out.register_hook(short)
            return out

        run.trainer.updater.policy.hidden = hidden

    return inject


def before_the_optimizer_applies(run: Session) -> None:
    optimizer = run.trainer.updater.optimizer
    optimizer._lay_out_gradients = at_call(optimizer._lay_out_gradients, 1)


def tree(model_folder: Path, folder: Path, learn: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder), "dtype": "float64"},
        "data": {"train": "object:rows"},
        "reward": [{"fn": "object:reward"}],
        "learn": {
            "prompts_per_step": 5,
            "samples_per_prompt": 4,
            "max_new_tokens": 12,
            "seed": 3,
            "sampling": {"stop_token_ids": list(range(3, 20))},  # so that lengths differ
            **learn,
        },
        "run": {"device": "cpu", "token_budget": 64, "score_token_budget": 64, **run},
        "observe": {"dir": str(folder), "tensorboard": False},
    }


INPUTS = Inputs(
    train_rows=[{"prompt": word} for word in WORDS],
    rewards={"reward": lambda completions, **_: [len(set(c)) / 10 + c.count("a") for c in completions]},
)
TWICE = {"updates_per_step": 2, "kl": {"coef": 0.1}}
"""Has passes for old and for reference log-probs."""


def step(model_folder: Path, folder: Path, learn: dict[str, Any], inject: Inject | None = None):
    """Tokens of a step, the gradient of its first update, its metrics and the weights after it; memory runs out on the way."""
    with ExitStack() as stack:
        session = open_session(config_from_dict(tree(model_folder, folder, learn)), INPUTS, stack)
        gradients: dict[str, torch.Tensor] = {}
        apply = session.trainer.updater.optimizer.apply

        def capture(lr: float):
            outcome_grads = {n: p.grad.clone() for n, p in session.trainer.updater.policy.model.named_parameters()}
            outcome = apply(lr)
            if not gradients:
                gradients.update(outcome_grads)
            return outcome

        session.trainer.updater.optimizer.apply = capture
        if inject is not None:
            inject(session)
        groups = session.buffer.next(session).groups
        metrics = loop.update(session, groups)
        weights = {n: p.detach().clone() for n, p in session.trainer.updater.policy.model.named_parameters()}
        recoveries = session.state.oom_recoveries
    tokens = {(g.prompt.id, t.sample): t.tokens.tolist() for g in groups for t in g.trajectories}
    return tokens, gradients, weights, metrics, recoveries


UPDATED, SCORED = 5, 4
"""Micro-batches of the two updates, and of a pass without a gradient."""
PHASES: dict[str, Inject] = {
    **{f"forward {n}": in_forward(PackedPlan, n, gradient=True) for n in range(1, UPDATED + 1)},
    **{f"backward {n}": in_backward(n) for n in range(1, UPDATED + 1)},
    **{f"score old {n}": in_forward(PackedPlan, n) for n in range(1, SCORED + 1)},
    **{f"score reference {n}": in_reference(n) for n in range(1, SCORED + 1)},
    "optimizer step": before_the_optimizer_applies,
    "prefill": in_forward(PrefillPlan, 1),
    **{f"decode {n}": in_forward(DecodePlan, n) for n in (1, 4)},
}


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return step(model_folder, tmp_path_factory.mktemp("undisturbed") / "run", TWICE)


def test_every_micro_batch_is_made_to_fail(model_folder: Path, tmp_path: Path, undisturbed) -> None:
    assert undisturbed[3]["run/microbatches"] == UPDATED
    assert undisturbed[4] == 0
    for inject in (in_forward(PackedPlan, SCORED + 1), in_reference(SCORED + 1)):
        assert step(model_folder, tmp_path / str(id(inject)), TWICE, inject)[4] == 0, "there is one more"


@pytest.mark.parametrize("name", PHASES)
def test_a_step_that_ran_out_of_memory_is_a_step_that_did_not(
    model_folder: Path, tmp_path: Path, undisturbed, name: str, capsys
) -> None:
    tokens, gradients, weights, metrics, recoveries = step(model_folder, tmp_path / "run", TWICE, PHASES[name])
    assert recoveries == 1
    assert tokens == undisturbed[0]
    assert_same_gradient(undisturbed[1], gradients, 1e-6)  # as for the token budget: norms compute in float32
    for key, expected in undisturbed[2].items():
        torch.testing.assert_close(weights[key], expected, atol=1e-8, rtol=0)
    for key in ("policy/loss", "policy/kl_ref", "policy/kl_old", "policy/grad_norm", "rollout/logprob_gap"):
        assert metrics[key] == pytest.approx(undisturbed[3][key], rel=1e-4, abs=1e-6), key
    assert metrics["run/max_microbatch_tokens"] <= 64
    assert "warning: step 1: out of memory in " in capsys.readouterr().out


def train(model_folder: Path, folder: Path, steps: int = 3, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    usual = {
        "data": [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(4)],
        "reward": letters,
        "learn": {"steps": steps, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-3},
        "observe": {"checkpoint_every": 1},
    }
    run = running.train({"path": str(model_folder), "dtype": "float64"}, folder, usual, changes)
    return run.folder, run.metrics


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return load_file(train(model_folder, tmp_path_factory.mktemp("whole") / "run")[0] / "final/model.safetensors")


def assert_same_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "final/model.safetensors")
    for name in expected:  # a few thousandths of the last bit of float32, after three updates of 1e-3
        torch.testing.assert_close(found[name], expected[name], atol=1e-7, rtol=0)


@pytest.mark.parametrize("phase", ["publish", "checkpoint", "export"])
def test_phases_around_the_update_are_repeated(
    model_folder: Path, tmp_path: Path, whole, phase: str, monkeypatch
) -> None:
    if phase == "publish":
        monkeypatch.setattr(NativeEngine, "publish", at_call(NativeEngine.publish, 3))
    elif phase == "checkpoint":
        monkeypatch.setattr(part, "write_tensors", at_call(part.write_tensors, 2))
    else:
        monkeypatch.setattr(export, "save_model", at_call(export.save_model, 1))
    folder, metrics = train(model_folder, tmp_path / "run")
    assert_same_weights(folder, whole)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-2", "step-3"]
    # The rest is after the step's row; that a checkpoint ran out of memory is found at the end of this step or of the next.
    counted = {"publish": [[0, 1, 1]], "checkpoint": [[0, 1, 1], [0, 0, 1]], "export": [[0, 0, 0]]}
    assert [row["run/oom_recoveries"] for row in metrics if row["step"]] in counted[phase]


def test_what_was_learned_about_memory_survives_a_resume(
    model_folder: Path, tmp_path: Path, whole, monkeypatch
) -> None:
    """And is a line in the trace, and in every row after it."""
    run = Policy.hidden
    largest: list[int] = []

    def hidden(self, tokens_T, positions_T, plan):
        if torch.is_grad_enabled():
            largest.append(tokens_T.shape[0])
            if tokens_T.shape[0] > 60:
                short()
        return run(self, tokens_T, positions_T, plan)

    monkeypatch.setattr(Policy, "hidden", hidden)
    folder, metrics = train(model_folder, tmp_path / "run", steps=1)
    taken = metrics[-1]["run/oom_recoveries"]
    assert taken >= 1
    assert metrics[-1]["run/token_budget"] < 100
    assert "out of memory in forward at micro-batch 1 of 1" in (folder / "trace.json").read_text()
    newest = newest_checkpoint(folder)
    assert newest is not None
    state = load_state(newest)
    assert state.oom_recoveries == taken
    assert state.memory["update"]["token_budget"] == metrics[-1]["run/token_budget"]
    assert state.memory["ceiling"]["token_budget"] > 60
    largest.clear()
    folder, metrics = train(model_folder, tmp_path / "run", steps=3, resume=True)
    assert max(largest) <= 60, "the resumed run starts where it was"
    assert metrics[-1]["run/oom_recoveries"] == taken
    assert_same_weights(folder, whole)


def test_a_step_that_may_be_half_applied_is_not_repeated(model_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(MasterAdamW, "_adamw", at_call(MasterAdamW._adamw, 2))
    with pytest.raises(MemoryExhausted, match="Some weights may have changed already"):
        train(model_folder, tmp_path / "run")


def test_a_run_that_cannot_go_on_says_why(model_folder: Path, tmp_path: Path, monkeypatch) -> None:
    run = Policy.hidden
    monkeypatch.setattr(Policy, "hidden", lambda self, *a: short() if torch.is_grad_enabled() else run(self, *a))
    with pytest.raises(
        MemoryExhausted, match=r"Bottleneck: one sequence of 1\d tokens has to fit.*lower learn\.max_new_tokens"
    ):
        train(model_folder, tmp_path / "run")
