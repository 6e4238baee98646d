"""Law 1: for every key of `run`, the gradient of a step is the same for every value, and so are the sampled tokens.

The schema is walked: a key without a case here fails the first test, so no key can be added without its proof.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.config.load import config_from_dict
from trimtab.config.run import Run
from trimtab.run import loop
from trimtab.run.inputs import Inputs
from trimtab.run.session import open_session

CASES: dict[str, list[Any]] = {
    "device": ["cpu", *(["cuda"] if torch.cuda.is_available() else [])],
    "devices": [1],  # several, and what they share, run in processes of their own: test_ranks.py
    "cluster": ["auto", "local"],  # a Ray cluster: tests/cluster/test_ray.py
    "wait_for_hosts": [0],
    "shard": ["auto"],
    "shard_devices": ["auto"],
    "sequence_parallel": ["auto", 1],  # test_sequence_parallel.py
    "tensor_parallel": ["auto", 1],  # more is refused
    "prefetch": ["auto"],
    "overlap": ["auto", False],
    "placement": ["auto", "colocated"],  # rollout on devices of its own: tests/cluster/test_split.py
    "profile": ["safe", "balanced", "max"],
    "memory": ["3GiB"],
    "threads": [1, 2],
    "engine": ["native"],  # vllm computes in float32 at most: test_engines.py
    "kernels": ["auto", "plain"],  # native and liger need a GPU and half precision: tests/gpu/test_liger_gpu.py
    "token_budget": [45, 64, 100_000],
    "score_token_budget": [45, 100_000],
    "logprob_chunk": [1, 7, 4096],
    "checkpoint_activations": [True, "some", False],
    "reward_workers": [1, 3],
    "rollout.max_sequences": [1, 3, 1000],
    "rollout.kv_memory": ["40KiB", "64MiB"],
    "rollout.prefill_tokens": [1, 16, 10_000],
    "rollout.page_tokens": [1, 5, 64],
    "rollout.prefix_cache": [True, False],
    "rollout.lend_memory": [True, False],
    "rollout.python": [None],  # of vllm: test_engines.py
    "rollout.eager": [None],
    "rollout.processes": ["auto"],
    "rollout.tensor_parallel": ["auto", 1],  # over several ranks: tests/cluster/test_cut_engine.py
    "offload.optimizer": [True, False],
    "offload.reference": [False],  # true needs a reference policy: below
    "offload.activations": [True, False],
}
TOLERANCE = {"device": 1e-5, "token_budget": 1e-6}
"""transformers' norms compute in float32 even in a float64 model. Two devices round that differently; and the gradient of a
prompt that several samples share goes through them as one sum, or as several where a budget cuts the group."""
WORDS = ["12+34=", "7+8=", "reverse abcdef=", "sort 40213=", "9+99="]


def run_keys(section: type = Run, prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and hasattr(inner, "model_fields"):
            keys += run_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def test_every_run_key_has_a_case() -> None:
    assert set(run_keys()) == set(CASES), (
        "every key in `run` needs a case here that shows it does not change the gradient"
    )


def step(
    model_folder: Path,
    tmp_path: Path,
    key: str | None = None,
    value: Any = None,
    learn: dict | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    **sections: Any,
):
    """Sampled tokens and the gradient of one whole step, in float64, with one key of `run` pinned; and into `weights` those that
    it leads to."""
    tree: dict[str, Any] = {
        "model": {"path": str(model_folder), "dtype": "float64"},
        "data": {"train": "object:rows"},
        "reward": [{"fn": "object:reward"}],
        "learn": {
            "prompts_per_step": 5,
            "samples_per_prompt": 4,
            "max_new_tokens": 12,
            "seed": 3,
            "sampling": {"stop_token_ids": list(range(3, 20))},  # so that lengths differ
            **(learn or {}),
        },
        "run": {"device": "cpu"},
        "observe": {"dir": str(tmp_path / f"{key}-{value}".replace("/", "_")), "tensorboard": False},
        **sections,
    }
    if key is not None:
        *above, name = key.split(".")
        section = tree["run"]
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    inputs = Inputs(
        train_rows=[{"prompt": word} for word in WORDS],
        base_dir=Path(__file__).parents[1] / "rollout" / "conversations",
        rewards={"reward": lambda completions, **_: [len(set(c)) / 10 + c.count("a") for c in completions]},
    )
    with ExitStack() as stack:
        session = open_session(config_from_dict(tree), inputs, stack)
        gradients: dict[str, torch.Tensor] = {}
        apply = session.trainer.updater.optimizer.apply

        def capture(lr: float):
            for name, parameter in session.trainer.updater.policy.model.named_parameters():
                if parameter.requires_grad and name not in gradients:
                    gradients[name] = parameter.grad.clone().cpu()
            return apply(lr)

        session.trainer.updater.optimizer.apply = capture
        groups = session.buffer.next(session).groups
        loop.update(session, groups)
        if weights is not None:
            weights |= {
                name: parameter.detach().clone()
                for name, parameter in session.trainer.updater.policy.model.named_parameters()
            }
    tokens = {(g.prompt.id, t.sample): t.tokens.tolist() for g in groups for t in g.trajectories}
    return tokens, gradients


def assert_same_gradient(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    """Equal up to the order of float64 sums."""
    assert one.keys() == two.keys()
    scale = max(g.abs().max() for g in one.values())
    assert scale > 0
    for name in one:
        torch.testing.assert_close(
            two[name], one[name], atol=float(scale) * tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def baseline(model_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return step(model_folder, tmp_path_factory.mktemp("baseline"))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in CASES.items() for value in values])
def test_gradient_and_tokens_are_the_same(model_folder: Path, tmp_path: Path, baseline, key: str, value: Any) -> None:
    tokens, gradients = step(model_folder, tmp_path, key, value)
    assert tokens == baseline[0]
    assert_same_gradient(baseline[1], gradients, TOLERANCE.get(key, 1e-9))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("score_token_budget", 45),
        ("token_budget", 45),
        ("rollout.max_sequences", 3),
        ("offload.reference", True),
        ("offload.optimizer", True),
    ],
)
def test_several_updates_a_batch_are_covered_too(model_folder: Path, tmp_path: Path, key: str, value: Any) -> None:
    """The first of two updates depends on the passes for old and reference log-probs, and on which prompts it is given."""
    learn = {"updates_per_step": 2, "kl": {"coef": 0.1}}
    one = step(model_folder, tmp_path, learn=learn)
    two = step(model_folder, tmp_path, key, value, learn=learn)
    assert one[0] == two[0]
    assert_same_gradient(one[1], two[1], TOLERANCE.get(key, 1e-9))


def test_weights_after_two_updates_are_those_of_an_optimizer_on_the_device(model_folder: Path, tmp_path: Path) -> None:
    """The same passes, so the same weights to the bit; a gradient alone would not show what an optimizer does."""
    here, away = {}, {}
    step(model_folder, tmp_path, learn={"updates_per_step": 2}, weights=here)
    step(model_folder, tmp_path, "offload.optimizer", True, learn={"updates_per_step": 2}, weights=away)
    assert here.keys() == away.keys() and here
    assert all(torch.equal(here[name], away[name]) for name in here)


def test_a_learn_key_does_change_the_gradient(model_folder: Path, tmp_path: Path, baseline) -> None:
    """The comparison above can fail: a setting that matters gives another gradient."""
    _, gradients = step(model_folder, tmp_path, learn={"aggregate": "token_mean"})
    with pytest.raises(AssertionError):
        assert_same_gradient(baseline[1], gradients)
