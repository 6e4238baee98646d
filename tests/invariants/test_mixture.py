"""Law 1 on a mixture: with balanced experts and replayed routes, every key of `run` gives the same tokens and the same gradient.

A cover of the keys that could matter to experts runs here, all of them in the slow suite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

from tests.forked_ranks import fork_ranks
from tests.invariants.test_gradient_invariance import CASES, TOLERANCE, assert_same_gradient, step
from tests.invariants.test_ranks import Case, assert_same, run
from trimtab.model.load import save_model

LEARN = {"router_aux_coef": 0.2, "router_replay": True}
RUN = {"device": "cpu", "engine": "native"}
COVER = [
    ("token_budget", 45),
    ("checkpoint_activations", True),
    ("rollout.max_sequences", 3),
    ("rollout.kv_memory", "40KiB"),
    ("offload.activations", True),
]
KEYS = [(key, value) for key, values in CASES.items() for value in values if key not in ("device", "engine")]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_model(tiny_model("qwen3_moe"), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def whole(mixture: Path, tmp_path_factory: pytest.TempPathFactory):
    return step(mixture, tmp_path_factory.mktemp("whole"), learn=LEARN, run=dict(RUN))


@pytest.mark.parametrize(
    ("key", "value"), [pytest.param(*each, marks=() if each in COVER else pytest.mark.slow) for each in KEYS]
)
def test_gradient_and_tokens_are_the_same(mixture: Path, tmp_path: Path, whole, key: str, value: Any) -> None:
    tokens, gradients = step(mixture, tmp_path, key, value, learn=LEARN, run=dict(RUN))
    assert tokens == whole[0]
    assert_same_gradient(whole[1], gradients, max(1e-6, TOLERANCE.get(key, 1e-9)))


def test_every_case_of_the_cover_is_one_of_law_1s() -> None:
    assert set(COVER) <= set(KEYS)


def test_balancing_changes_the_gradient_and_replaying_ones_own_choice_does_not(
    mixture: Path, tmp_path: Path, whole
) -> None:
    """In float64 engine and trainer choose alike."""
    plain = step(mixture, tmp_path / "plain", learn={}, run=dict(RUN))
    replayed = step(mixture, tmp_path / "replayed", learn={"router_replay": True}, run=dict(RUN))
    assert plain[0] == replayed[0] == whole[0]
    assert_same_gradient(plain[1], replayed[1], 1e-6)
    with pytest.raises(AssertionError):
        assert_same_gradient(whole[1], plain[1], 1e-3)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "case",
    [
        Case("grpo", 2, "gradients", token_budget=45),
        pytest.param(Case("grpo", 2, "full", token_budget=45), marks=pytest.mark.slow),
        pytest.param(Case("gspo", 2, "none", lora=True), marks=pytest.mark.slow),
        pytest.param(Case("gspo", 2, "optimizer"), marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_ranks_balance_over_the_whole_step(
    case: Case, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks(monkeypatch)
    one, many = (run(each, mixture, tmp_path / str(each.devices), router_aux_coef=0.2) for each in (case.alone, case))
    assert_same(case, one, many, mixture)
