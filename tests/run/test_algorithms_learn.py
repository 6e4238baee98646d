"""bench/algorithms.py, shortened: from one warm start the reward rises clearly with every algorithm that it compares.

A model of 40,000 parameters sorts two digits; right or wrong is the only reward. On a CPU a run is the same every time, so this
either always passes or never does. The accuracy that each algorithm comes to in the end is the bench's to show.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from tiny import tiny_model

from trimtab import demo
from trimtab.data.tasks import TASKS
from trimtab.model.load import save_model
from trimtab.model.policy import Policy

FILE = Path(__file__).parents[2] / "bench" / "algorithms.py"
DIGITS, STEPS = 2, 16
NAMED = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo")
COVER = ("ppo", "grpo", "dapo")
"""With a critic, without, and with groups drawn anew; the others are as these but for a formula that has tests of its own."""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = spec_from_file_location("bench_algorithms", FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two dozen supervised steps: it writes digits, and one answer in five is right."""
    folder, tokenizer = tmp_path_factory.mktemp("warm"), demo.build_tokenizer()
    model = tiny_model(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    rows = TASKS[demo.TASK].generate(512, DIGITS, 0, "train")
    demo.warm_start(Policy(model), tokenizer, rows, 24, batch=64, lr=3e-3)
    save_model(model, tokenizer, folder / "warm-start")
    return folder


def test_the_bench_compares_all_that_it_should(bench: ModuleType) -> None:
    assert tuple(bench.SETTINGS) == NAMED


@pytest.mark.parametrize(
    "algorithm", [name if name in COVER else pytest.param(name, marks=pytest.mark.slow) for name in NAMED]
)
def test_the_reward_rises(bench: ModuleType, warm: Path, tmp_path: Path, algorithm: str) -> None:
    sizes = {"prompts_per_step": 32, "lr": 1.5e-3}
    found = bench.learn(algorithm, 0, tmp_path, STEPS, start=warm, difficulty=DIGITS, **sizes)
    rewards = found["rewards"]
    first, last = (sum(part) / 4 for part in (rewards[:4], rewards[-4:]))
    assert len(rewards) == STEPS and 0.1 < first < 0.3
    assert last > first + 0.15 and last > 1.6 * first, rewards
