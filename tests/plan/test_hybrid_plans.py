"""Plans for models whose layers carry a state: sizes of real configs, what sequences carry, what tokens keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BASE, HYBRIDS, MIXTURE_HYBRIDS, tiny_hybrid, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.model.policy import Policy
from trimtab.model.recurrent import Mixer, let_plans_mix
from trimtab.model.shapes import state_shapes
from trimtab.model.sizes import prompt_slots
from trimtab.model.versions import STATES_ARE_HANDED
from trimtab.plan.devices import of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import STATES
from trimtab.plan.mixing import Mixing, gated_delta, short_convolution, state_space
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import ModelShape
from trimtab.rollout.native.states import StateCache
from trimtab.run.shapes import measured_shape, shape_of

pytestmark = pytest.mark.skipif(not STATES_ARE_HANDED, reason="transformers before 5.22 hands no states over")
CONFIGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "hybrid_configs.json").read_text())
SIZES = {
    "qwen3-next-80b-a3b": (79.7, 24576, 77.9),
    "qwen3.5-text-2b": (1.88, 12288, 19.8),
    "lfm2-1.2b": (1.17, 12288, 0.123),
    "nemotron-h-8b": (8.10, 16384, 102.6),
    "granite-4.0-h-micro": (3.19, 8192, 76.8),
    "falcon-h1-1.5b": (1.48, 24576, 76.2),
    "bamba-9b": (9.78, 12288, 123.6),
    "olmo-hybrid-7b": (7.43, 122880, 55.3),
}
"""Thousand millions of parameters; bytes that a token stores in bfloat16; millions of bytes that a sequence carries."""


def shape_at(folder: Path, name: str) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return shape_of(str(folder))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("lfm2-1.2b", "qwen3.5-text-2b") else pytest.mark.slow) for name in SIZES],
)
def test_sizes_of_real_configs(name: str, tmp_path: Path) -> None:
    shape = shape_at(tmp_path, name)
    parameters, stored, carried = SIZES[name]
    assert shape.parameters / 1e9 == pytest.approx(parameters, rel=5e-3)
    assert 2 * shape.kv_elements == stored
    assert shape.state_bytes(2) / 1e6 == pytest.approx(carried, rel=2e-2)


@pytest.mark.parametrize("name", [*HYBRIDS, *(f"{name} of experts" for name in MIXTURE_HYBRIDS)])
def test_a_measured_shape_has_the_models_parameters_and_states(name: str) -> None:
    kind = name.removesuffix(" of experts")
    settings = (HYBRIDS if kind == name else MIXTURE_HYBRIDS)[kind]
    shape = measured_shape(AutoConfig.for_model(kind, **{**BASE, **settings}))
    model = tiny_model(kind, **settings)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.state_bytes(4) == sum(s.nbytes for s in state_shapes(Policy(model)).values())
    assert shape.has_experts == (kind != name)


def test_an_engine_allocates_what_the_ledger_counts() -> None:
    policy = Policy(tiny_hybrid("qwen3_next"))
    sizes = []

    def empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(torch.empty(shape, dtype=dtype).nbytes)
        return torch.empty(shape, dtype=dtype)

    StateCache(state_shapes(policy), 100, empty)
    shape = measured_shape(policy.model.config)
    assert sum(sizes) == (100 + 1 + prompt_slots(100)) * shape.state_bytes(4)


def kept_per_token(mixer: Mixer, hidden: int, tokens: int = 512) -> float:
    """Bytes that autograd keeps of a pass through a mixer, without its weights."""
    own, found = {p.untyped_storage().data_ptr() for p in mixer.parameters()}, {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = (
                x.untyped_storage().nbytes(),
                x,
            )  # alive, so that no address is used twice
        return x

    x = torch.randn(1, tokens, hidden, dtype=next(mixer.parameters()).dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mixer.mix(x, None)
    return sum(size for size, _ in found.values()) / tokens


def mixer_of(kind: str, dtype: torch.dtype, **changes: Any) -> Mixer:
    config = AutoConfig.for_model(kind, **{**BASE, **HYBRIDS[kind], **changes})
    body = AutoModelForCausalLM.from_config(config, dtype=dtype).get_decoder()
    let_plans_mix(body)
    return next(module for module in body.modules() if isinstance(module, Mixer))


CASES: list[tuple[Mixing, str, dict[str, Any]]] = [
    (
        gated_delta(64, 2 * 2 * 64 + 4 * 32, 4, 4, 64, 32), "qwen3_5_text",
        {"hidden_size": 64, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 32},
    ),
    (
        gated_delta(64, 2 * 2 * 128 + 2 * 128, 4, 2, 128, 128), "qwen3_5_text",
        {"hidden_size": 64, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    (
        state_space(64, 8 * 64 + 2 * 128, 4, 8, 64, 128, 128), "nemotron_h",
        {"hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 1, "chunk_size": 128},
    ),
    (short_convolution(128, 128, 3), "lfm2", {"hidden_size": 128}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counted", "kind", "changes"), CASES, ids=["delta", "wide delta", "mamba", "convolution"])
def test_what_a_mixer_keeps_is_counted(counted: Mixing, kind: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    kept = kept_per_token(mixer_of(kind, dtype, **changes), changes["hidden_size"])
    assert counted.kept_bytes(dtype.itemsize) == pytest.approx(kept, rel=0.1)


FITS = {
    "qwen3-next-80b-a3b": (),
    "bamba-9b": (48, 80, 141),
}
"""Sizes of cards, in GB, on which adapters on attention train in bfloat16; all the others do on 24 GB."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "lfm2-1.2b" else pytest.mark.slow) for n in SIZES])
def test_plans_of_real_configs_on_cards(name: str, tmp_path: Path) -> None:
    shape = shape_at(tmp_path, name)
    adapters = shape.lora_parameters(16, ["q_proj", "o_proj"])
    job = Job(
        shape, itemsize=2, prompts=16, samples=8, longest_prompt=512, typical_prompt=512, completion=1024, rank=16,
        adapters=adapters, fused=False,
    )  # fmt: skip
    for size in (24, 48, 80, 141):
        machine = Machine(of_size(int(size * 0.995e9)), 1, 400 * GIB, 16)
        plan = make_plan(Run(), job, machine, "max")
        assert plan.fits == (size in FITS.get(name, (24, 48, 80, 141))), (name, size)
        if plan.fits:
            rows = plan.run.rollout.max_sequences
            assert plan.ledger["rollout"].device[STATES] == (rows + 1 + prompt_slots(rows)) * shape.state_bytes(2)
            assert 0 < plan.times.update < plan.times.total < 2000
