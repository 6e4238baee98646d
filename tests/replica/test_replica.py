"""A whole run, replayed by another trainer from what it sampled, ends with the same weights.

The other trainer (trainer.py) is padded, plain and written apart; it has recipes and defaults of its own. So a formula, a recipe,
a default or a schedule that is changed in Trimtab alone shows here, and one that is wrong in both was misread twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from replica.cases import COVER, FULL, REWARD_MODELS, SFT, Case
from replica.opinions import brief, few
from replica.record import Record, Weights, record_offline, record_training
from replica.settings import complete
from replica.trainer import Replica, replay_offline
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Algorithm, Learn
from trimtab.model.load import save_model

SHOWS = 0.01
"""A setting that is left out moves the end by at least this, in lengths of the way that the weights went."""

ROWS = [{"prompt": "7" * (1 + number % 5) + f"+{number}=", "answer": str(number)} for number in range(24)]
PAIRS = [
    {"prompt": f"{n}=", "chosen": "a" * (1 + n % 4), "rejected": "bc" * (1 + n % 3), "by": n % 3} for n in range(24)
]
WORKED = [{"prompt": f"{n}=", "completion": "abcdefgh"[: 1 + n % 7]} for n in range(24)]
BASE = {
    "steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-2,
    # A gradient that is only rounding (no signal, no distance to the reference yet) must not be made a step of full length.
    "optimizer": {"eps": 1e-3},
}  # fmt: skip
STOPS = list(range(30, 42))  # some of the letters: completions end at different lengths


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    model = tiny_model("llama", torch.float64, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    save_model(model, tiny_tokenizer(), folder)
    return folder


def load(start: Path, lora: dict[str, Any] | None, begun: Weights) -> Any:
    """The model where the run began."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    if lora is not None:
        alpha = lora.get("alpha", 2 * lora["r"])
        model = get_peft_model(
            model, LoraConfig(r=lora["r"], lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(begun[name])
    return model.eval()


def trained(case: Case, start: Path, folder: Path, patch: pytest.MonkeyPatch) -> Record:
    learn = {**BASE, **case.learn}
    learn["sampling"] = {"stop_token_ids": STOPS, **learn.get("sampling", {})}
    rewards = [few, brief] if case.parts else [few]
    settings = [{**part, "fn": fn} for part, fn in zip(case.parts, rewards)] if case.parts else few
    return record_training(
        patch,
        model={"path": str(start), "dtype": "float64", **({"lora": case.lora} if case.lora else {})},
        data=ROWS,
        reward=settings,
        learn=learn,
        run={"token_budget": 64, "score_token_budget": 48},
        observe={"dir": str(folder / "run"), "tensorboard": False},
    )


def replayed(case: Case, learn: dict[str, Any], start: Path, record: Record) -> Replica:
    replica = Replica(
        load(start, case.lora, record.start), {**BASE, **learn}, case.parts, adapters=case.lora is not None
    )
    for groups in record.steps:
        replica.step(groups)
    return replica


def apart(found: Weights, expected: Weights, begun: Weights) -> float:
    """How far two ends are from each other, in lengths of the way to the expected one."""
    assert found.keys() == expected.keys()
    flat = [torch.cat([weights[name].flatten() for name in sorted(expected)]) for weights in (found, expected, begun)]
    way = float((flat[1] - flat[2]).norm())
    assert way > 1e-3, "nothing was learned"
    return float((flat[0] - flat[1]).norm()) / way


def check(case: Case, start: Path, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Record, Replica]:
    record = trained(case, start, folder, patch)
    replica = replayed(case, case.learn, start, record)
    assert len(record.steps) == BASE["steps"]
    assert apart(record.end, replica.weights(), record.start) < case.tolerance
    assert record.kl_coefs[-1] == pytest.approx(replica.coef, rel=1e-5)
    if replica.critic is not None:
        expected = replica.critic.weights()
        begun = {name: record.start.get(name, torch.zeros_like(value)) for name, value in expected.items()}
        assert apart(record.critic_end, expected, begun) < case.tolerance
    return record, replica


@pytest.mark.parametrize("case", COVER, ids=lambda case: case.name)
def test_a_run_is_what_another_trainer_makes_of_what_it_sampled(
    case: Case, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, replica = check(case, start, tmp_path, monkeypatch)
    for name in case.shows if case.tolerance < SHOWS else []:
        others = {key: value for key, value in case.learn.items() if key != name}
        without = replayed(case, others, start, record)
        assert apart(without.weights(), replica.weights(), record.start) > SHOWS, f"{name} makes no difference here"


@pytest.mark.slow
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_every_algorithm_with_every_option(
    case: Case, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, start, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("sft", name) for name in SFT), *(("reward model", name) for name in REWARD_MODELS)]
)
def test_so_are_supervised_runs_and_reward_models(
    kind: str, name: str, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = {"steps": 4, "lr": 1e-2, **(SFT if kind == "sft" else REWARD_MODELS)[name]}
    size = {"sequences_per_step": 6} if kind == "sft" else {"pairs_per_step": 6}
    record = record_offline(
        monkeypatch,
        kind,
        model={"path": str(start), "dtype": "float64"},
        data=WORKED if kind == "sft" else {"train": PAIRS, "margin": "by"},
        learn={**learn, **size},
        run={"token_budget": 40},
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )
    assert [len(items) for items in record.steps] == [6] * 4
    expected = replay_offline(load(start, None, {}), record.steps, learn, kind)
    begun = {name: record.start.get(name, torch.zeros_like(value)) for name, value in expected.items()}
    assert apart(record.end, expected, begun) < 1e-4


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_recipes_and_defaults_are_those_written_down_apart(algorithm: str) -> None:
    """Also where no run could tell: a bound that no ratio comes near, a default that every case changes."""
    learn = resolve(Learn.model_validate({"algorithm": algorithm})).model_dump()
    expected = complete({"algorithm": algorithm})
    assert learn["dynamic_sampling"]["enabled"] == expected.pop("dynamic")
    for name, value in expected.items():
        if isinstance(value, dict):
            assert {key: learn[name][key] for key in value} == value, name
        else:
            assert learn[name] == value, name


def test_the_replica_shares_no_code_with_what_it_checks() -> None:
    """Only record.py, which watches a run, and this file import Trimtab."""
    here = Path(__file__).parent
    for name in ("settings", "rewards", "trainer", "cases", "opinions"):
        assert "trimtab." not in (here / f"{name}.py").read_text().replace("Trimtab.", ""), name
