"""Law 1 over several ranks: the gradient of a step, the sampled tokens and the weights after three steps are one process's.

In float64, up to the order of sums: TOLERANCE is of the way that the weights went. Where parameters are rounded (bfloat16 with
float32 masters, moments of 8 bits) the tolerance is stated with the case; bfloat16 is compared where nothing is sampled, because
rounding in another batch draws other tokens. A few cases cover the settings here; many combinations are in the slow suite.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from quick_rewards import variety
from running import left, train
from safetensors.torch import load_file
from tiny import tiny_model

from tests.forked_ranks import fork_ranks
from trimtab.model.load import save_model
from trimtab.record.reader import RunReader

TOLERANCE = 2e-5
"""transformers' norms compute in float32 even in a float64 model, and ranks cut groups of samples elsewhere."""
ROUNDED = 0.05
"""bfloat16 and 8-bit state: a rounding that falls the other way is one part in 256 of a weight or of a block's largest moment."""
WORDS = ["12+34=", "7+8=", "reverse abcdef=", "sort 40213=", "9+99="]
PAIRS = [
    {"prompt": w, "completion": str(i), "chosen": "a" * i + "b", "rejected": "c" * (i + 1)} for i, w in enumerate(WORDS)
]
OPTIMIZER = {"eps": 1e-3}
RL = {"prompts_per_step": 5, "samples_per_prompt": 4, "max_new_tokens": 10, "seed": 3}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("train", {**RL, "kl": {"coef": 0.05}}),
    "gspo": ("train", {**RL, "algorithm": "gspo", "updates_per_step": 2}),
    "ppo": ("train", {**RL, "algorithm": "ppo", "critic": {"lr": 1e-2}}),
    "sft": ("sft", {"sequences_per_step": 5}),
    "reward_model": ("reward_model", {"pairs_per_step": 5}),
}


class Case(NamedTuple):
    """What is trained, and on how many ranks."""

    stage: str
    devices: int
    shard: str
    shard_devices: int | str = "auto"
    dtype: str = "float64"
    lora: bool = False
    tied: bool = False
    states: str = "full"
    offload: bool = False
    token_budget: int | str = "auto"
    overlap: bool | str = "auto"
    sequence: Any = "auto"
    """Ranks that share each micro-batch."""
    kv_heads: int = 2

    @property
    def alone(self) -> Case:
        alone = self._replace(devices=1, shard="auto", shard_devices="auto", token_budget="auto", overlap="auto")
        return alone._replace(sequence="auto")

    @property
    def tolerance(self) -> float:
        return ROUNDED if self.dtype == "bfloat16" or self.states == "8bit" else TOLERANCE


COVER = [
    Case("grpo", 2, "none", offload=True),
    Case("grpo", 2, "optimizer", tied=True, states="8bit"),
    Case("grpo", 4, "gradients", shard_devices=2, token_budget=45),
    Case("gspo", 4, "optimizer", shard_devices=2, tied=True),
    Case("gspo", 2, "gradients", lora=True, offload=True),
    Case("ppo", 2, "optimizer", token_budget=45, overlap=False),
    Case("ppo", 2, "gradients", states="8bit"),
    Case("sft", 4, "none", lora=True, token_budget=60),
    Case("sft", 2, "gradients", dtype="bfloat16", tied=True, states="8bit", offload=True),
    Case("reward_model", 2, "gradients", token_budget=60),
    Case("reward_model", 4, "optimizer", dtype="bfloat16"),
    Case("grpo", 2, "full", tied=True, token_budget=45),
    Case("gspo", 4, "full", shard_devices=2, lora=True),
    Case("ppo", 2, "full", offload=True, token_budget=45),
    Case("sft", 2, "full", dtype="bfloat16", tied=True),
    Case("reward_model", 2, "full", token_budget=60),
]
PRODUCT = [
    Case(stage, devices, shard, dtype=dtype, lora=lora, tied=tied, states=states, offload=offload, token_budget=budget)
    for stage, devices, shard, dtype, lora, tied, states, offload, budget in itertools.product(
        STAGES, (2, 4), ("none", "optimizer", "gradients", "full"), ("float64", "bfloat16"), (False, True), (False, True),
        ("full", "8bit"), (False, True), ("auto", 60),
    )
    if not (lora and (tied or states == "8bit"))
    and not (shard == "full" and states == "8bit")
    and (dtype == "float64" or stage in ("sft", "reward_model"))
]  # fmt: skip


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked: importing torch takes longer than these runs."""
    fork_ranks(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> dict[bool, Path]:
    """Tiny models, by whether the head is tied to the embedding."""
    found = {}
    for tied in (False, True):
        found[tied] = tmp_path_factory.mktemp(f"tied-{tied}")
        save_model(tiny_model("qwen3", tie_word_embeddings=tied), tokenizer, found[tied])
    return found


class Outcome(NamedTuple):
    weights: dict[str, torch.Tensor]
    tokens: list[Any]
    metrics: list[dict[str, Any]]


def run(case: Case, model: Path, folder: Path, steps: int = 3, **learn: Any) -> Outcome:
    """Train; and no process is left afterwards."""
    stage, settings = STAGES[case.stage]
    rl = stage == "train"
    optimizer = {**OPTIMIZER, **({"states": "8bit"} if case.states == "8bit" else {})}
    devices: dict[str, Any] = {"devices": case.devices}
    if case.devices > 1:
        devices |= {"shard": case.shard, "shard_devices": case.shard_devices}
    if case.shard == "full":
        devices |= {"prefetch": 2}
    arguments: dict[str, Any] = {
        "data": [{"prompt": word} for word in WORDS] if rl else PAIRS,
        "learn": {"steps": steps, "lr": 1e-2, **settings, "optimizer": optimizer, **learn},
        "run": {
            "device": "cpu", "token_budget": case.token_budget, "overlap": case.overlap, "sequence_parallel": case.sequence,
            "offload": {"optimizer": case.offload}, **devices,
        },
        "observe": {"checkpoint_every": 0, **({"samples_every": 1} if rl else {})},
    }  # fmt: skip
    if rl:
        arguments |= {"reward": variety}
        arguments["run"]["reward_workers"] = 1
    named = {"path": str(model), "dtype": case.dtype, **({"lora": {"r": 4}} if case.lora else {})}
    before = set(psutil.Process().children(recursive=True))
    done = train(named, folder, arguments, stage=stage)
    assert not left(set(psutil.Process().children(recursive=True)) - before)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((done.folder / "final").glob("*.safetensors")):
        weights |= load_file(file)
    samples = [json.loads(line) for file in sorted((done.folder / "samples").glob("step-*")) for line in file.open()]
    return Outcome(weights, [(s["prompt"], s["completion"]) for s in samples], done.metrics)


def way(weights: dict[str, torch.Tensor], began: dict[str, torch.Tensor]) -> float:
    """How far the weights went from where they began."""
    shared = [(weights[name].double(), began[name].double()) for name in weights if name in began]
    return float(torch.stack([(a - b).norm() for a, b in shared]).norm())


def assert_same(case: Case, one: Outcome, many: Outcome, model: Path) -> None:
    began = load_file(model / "model.safetensors")
    went = way(one.weights, began)
    assert went > 1e-3, "nothing was learned, so nothing is compared"
    assert one.weights.keys() == many.weights.keys()
    apart = float(
        torch.stack([(one.weights[n].double() - many.weights[n].double()).norm() for n in one.weights]).norm()
    )
    assert apart <= case.tolerance * went, f"{case}: weights are {apart / went:.2g} of their way apart"
    if case.tolerance == TOLERANCE:
        assert one.tokens == many.tokens
        name = "policy/grad_norm"
        assert [row[name] for row in many.metrics if name in row] == pytest.approx(
            [row[name] for row in one.metrics if name in row], rel=1e-5
        )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case)))
def test_ranks_learn_what_one_process_learns(case: Case, models: dict[bool, Path], tmp_path: Path) -> None:
    model = models[case.tied]
    one, many = (run(each, model, tmp_path / str(each.devices)) for each in (case.alone, case))
    assert_same(case, one, many, model)
    assert all(row["run/rank_imbalance"] >= 1 for row in many.metrics if "run/rank_imbalance" in row)


@pytest.mark.timeout(240)
def test_ranks_are_in_the_record(models: dict[bool, Path], tmp_path: Path) -> None:
    """Each on its own track, and their seconds are the slowest one's."""
    found = run(Case("grpo", 2, "optimizer"), models[False], tmp_path / "a", 2)
    reader = RunReader(tmp_path / "a")
    trace = reader.trace()
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    spans = {(names[event["tid"]], event["name"]) for event in trace if event["ph"] == "X"}
    for rank in (0, 1):
        assert {(f"rank {rank}", name) for name in ("prefill", "decode", "micro-batch", "optimizer step")} <= spans
    assert {"running sequences, rank 0", "KV pages, rank 1"} <= {e["name"] for e in trace if e["ph"] == "C"}
    last = found.metrics[-1]
    assert last["update/forward_backward_s"] > 0 and last["rollout/tail_s"] >= 0 and last["memory/update_peak_gib"] > 0
    assert (reader.run()["state"], reader.run()["device"]["count"]) == ("finished", 2)


@pytest.mark.timeout(240)
def test_the_gradient_of_a_step_is_one_processes(models: dict[bool, Path], tmp_path: Path) -> None:
    """Adam with an eps far above any gradient, and as large a rate, moves every weight by its gradient."""
    settings = {"optimizer": {"eps": 1e8, "weight_decay": 0.0}, "lr": 1e8, "max_grad_norm": None}
    began = load_file(models[False] / "model.safetensors")
    case = Case("grpo", 2, "gradients", token_budget=45)
    found = []
    for each in (case.alone, case):
        weights = run(each, models[False], tmp_path / str(each.devices), 1, **settings).weights
        found.append({name: began[name].double() - weight for name, weight in weights.items()})
    scale = max(float(gradient.abs().max()) for gradient in found[0].values())
    assert scale > 1e-3
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, atol=1e-6 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", PRODUCT[::17], ids=lambda case: "-".join(map(str, case)))
def test_all_settings_together(case: Case, models: dict[bool, Path], tmp_path: Path) -> None:
    """Every seventeenth of all combinations: a prime, so that each setting meets each other."""
    model = models[case.tied]
    one, many = (run(each, model, tmp_path / str(each.devices)) for each in (case.alone, case))
    assert_same(case, one, many, model)
