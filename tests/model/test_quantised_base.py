"""Adapters over a base in codes: the same as plain transformers and PEFT on the weights that the codes stand for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from running import letters, train
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from tests.invariants.test_gradient_invariance import WORDS, assert_same_gradient, step
from trimtab.base.errors import ConfigError
from trimtab.config.load import config_from_dict
from trimtab.config.schema import Model
from trimtab.model.adapters import add_adapters, merged_state
from trimtab.model.codes import QuantisedLinear, parameter_elements, quantise_layers, quantised_names
from trimtab.model.load import load_model, save_model
from trimtab.model.packed import PackedPlan
from trimtab.model.parts import Unfusable, read_parts
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.plan.quantised import weight_bytes
from trimtab.plan.work import Lengths, Models, job_of
from trimtab.run import loop
from trimtab.run.inputs import Inputs
from trimtab.run.session import open_session
from trimtab.run.shapes import shape_of_model

CPU = torch.device("cpu")


def folder_of(tmp_path: Path, architecture: str = "qwen2", **changes: Any) -> Path:
    folder = tmp_path / architecture
    save_model(tiny_model(architecture, **changes), tiny_tokenizer(), folder)
    return folder


def in_codes(folder: Path, base: str, dtype: str = "float64") -> Any:
    model = Model.model_validate({"path": str(folder), "dtype": dtype, "base": base, "lora": {"r": 3}})
    assert model.lora is not None
    return add_adapters(load_model(model, CPU), model.lora, seed=1)


def learned(model: Any) -> None:
    """As if adapters had learned something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))


@pytest.mark.parametrize("base", ["fp8", "4bit"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "phi3"])
def test_hidden_states_and_gradients_are_those_of_plain_peft(tmp_path: Path, base: str, architecture: str) -> None:
    """Widths 32 and 48 are multiples of no block."""
    folder = folder_of(tmp_path, architecture)
    ours = in_codes(folder, base)
    learned(ours)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    changed = 0
    for name, module in ours.get_base_model().named_modules():
        if isinstance(module, QuantisedLinear):
            weight = plain.get_submodule(name.removesuffix(".base_layer")).weight
            changed += int(not torch.equal(weight, module.dequantised()))
            weight.data.copy_(module.dequantised())
    assert changed == len(quantised_names(plain)) > 0
    theirs = get_peft_model(plain, LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.0))
    with torch.no_grad():
        for (name, mine), (other, parameter) in zip(
            [(n, p) for n, p in ours.named_parameters() if "lora_" in n],
            [(n, p) for n, p in theirs.named_parameters() if "lora_" in n],
            strict=True,
        ):
            assert name == other
            parameter.copy_(mine)
    policy = Policy(ours)
    tokens = torch.arange(3, 14)
    plan = PackedPlan([len(tokens)], "cpu")
    found = policy.head.logits(policy.hidden(tokens, plan.positions, plan))
    expected = theirs(input_ids=tokens[None], use_cache=False).logits[0]
    # transformers' norms compute in float32, and so do adapters beside a float64 model
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            scale = float(grads[name].grad.abs().max())
            torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("base", ["fp8", "4bit"])
def test_the_planner_counts_the_bytes_that_are_there(tmp_path: Path, base: str) -> None:
    folder = folder_of(tmp_path, "qwen2", hidden_size=96, intermediate_size=200)
    model = in_codes(folder, base, "bfloat16")
    shape = shape_of_model(model)
    assert shape.parameters == parameter_elements(tiny_model("qwen2", hidden_size=96, intermediate_size=200))
    stored = {id(p): p.nbytes for n, p in model.named_parameters() if "lora_" not in n}
    config = config_from_dict(run_of(folder, base, "bfloat16"))
    from trimtab.config.resolved import resolve_config

    job = job_of(resolve_config(config), Models(shape, 2, adapters=1), Lengths(8, 8))
    assert weight_bytes(job) == sum(stored.values())
    plain = tiny_model("qwen2", hidden_size=96, intermediate_size=200, dtype=torch.bfloat16)
    assert weight_bytes(job) < 0.75 * sum(p.nbytes for p in plain.parameters()), "most of a tiny model is its embedding"


def run_of(folder: Path, base: str, dtype: str = "float64", **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(folder), "dtype": dtype, "base": base, "lora": {"r": 3}},
        "data": {"train": "object:rows"},
        "reward": [{"fn": "object:reward"}],
        "learn": {"prompts_per_step": 3, "samples_per_prompt": 3, "max_new_tokens": 8, "steps": 2, "lr": 1e-2},
        "run": {"device": "cpu"},
        "observe": {"dir": str(folder.parent / "run"), "tensorboard": False},
        **sections,
    }


@pytest.mark.parametrize("base", ["fp8", "4bit"])
def test_engine_and_trainer_agree_and_the_export_is_the_policy(tmp_path: Path, base: str) -> None:
    """A run in float32: the gap between the engine's log-probs and the trainer's is rounding, and RUN/final loads anywhere."""
    folder = folder_of(tmp_path)
    inputs = Inputs(
        train_rows=[{"prompt": word} for word in WORDS],
        base_dir=tmp_path,
        rewards={"reward": lambda completions, **_: [len(set(c)) / 10 for c in completions]},
    )
    with ExitStack() as stack:
        session = open_session(config_from_dict(run_of(folder, base, "float32")), inputs, stack)
        for _ in range(2):
            metrics = loop.update(session, session.buffer.next(session).groups)
            session.generator.publish(session.state.version)
        assert metrics["rollout/logprob_gap"] < 1e-5
        policy = session.trainer.updater.policy
        save_model(policy.model, tiny_tokenizer(), tmp_path / "final")
        tokens = torch.arange(3, 14)
        plan = PackedPlan([len(tokens)], "cpu")
        with torch.no_grad():
            found = policy.head.logits(policy.hidden(tokens, plan.positions, plan)).log_softmax(-1)
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
        with torch.no_grad():
            expected = back(input_ids=tokens[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(found.float(), expected.float(), atol=1e-4, rtol=1e-4)
        names = set(merged_state(policy.model))
        assert names == set(tiny_model("qwen2").state_dict()), "no trace of codes"


@pytest.mark.parametrize(("key", "value"), [("token_budget", 45), ("checkpoint_activations", True), ("logprob_chunk", 7),
                                            ("rollout.max_sequences", 3), ("offload.optimizer", True)])  # fmt: skip
def test_law_1_holds_over_a_base_in_codes(tmp_path: Path, key: str, value: Any) -> None:
    folder = folder_of(tmp_path)
    model = {"path": str(folder), "dtype": "float64", "base": "4bit", "lora": {"r": 3}}

    def gradients(*setting: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        return step(folder, tmp_path, *setting, model=model)

    one, two = gradients(), gradients(key, value)
    assert one[0] == two[0]
    assert_same_gradient(one[1], two[1], 1e-5)  # adapters are float32


def test_what_cannot_have_a_base_in_codes_is_told_what_to_write() -> None:

    for sections, words in [
        ({"model": {"path": "x", "base": "4bit"}}, "Write model.lora: {r: 16}, or model.base: bf16"),
        ({"model": {"path": "x", "base": "fp8", "lora": {"r": 2}}, "run": {"engine": "vllm"}}, "run.engine: native"),
        (
            {"model": {"path": "x", "base": "fp8", "lora": {"r": 2}}, "run": {"shard": "full", "devices": 2}},
            "shard: auto",
        ),
    ]:
        with pytest.raises(ConfigError) as told:
            config_from_dict(run_of(Path("x"), "auto") | sections)
        (problem,) = told.value.problems
        assert problem.where == "model.base" and words in problem.fix


@pytest.mark.parametrize("base", ["fp8", "4bit"])
def test_a_run_in_two_sittings_ends_with_the_same_adapters(tmp_path: Path, base: str) -> None:
    """A checkpoint holds adapters alone: the base is put into the same codes again."""
    folder = folder_of(tmp_path)
    usual = {
        "model": {"path": str(folder), "base": base, "lora": {"r": 3}}, "data": [{"prompt": word} for word in WORDS],
        "reward": letters, "learn": {"prompts_per_step": 3, "samples_per_prompt": 3, "max_new_tokens": 6, "lr": 1e-2},
        "run": {"device": "cpu"}, "observe": {"checkpoint_every": 1},
    }  # fmt: skip
    whole = train(usual["model"], tmp_path / "whole", usual, {"learn": {"steps": 3}}).folder
    train(usual["model"], tmp_path / "halves", usual, {"learn": {"steps": 1}})
    halves = train(usual["model"], tmp_path / "halves", usual, {"learn": {"steps": 3}, "resume": True}).folder
    one, two = (load_file(run / "final" / "adapter" / "adapter_model.safetensors") for run in (whole, halves))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(name.endswith("lora_B.weight") and value.abs().max() > 0 for name, value in one.items())
    held = {file.name for file in (whole / "checkpoints").rglob("*.safetensors")}
    assert "adapter_model.safetensors" in held and "model.safetensors" not in held


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "mixtral")
    tree = run_of(folder, "4bit")
    tree["model"]["lora"] = {"r": 2, "targets": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"model.base.*experts"), ExitStack() as stack:
        open_session(config_from_dict(tree), Inputs(train_rows=[{"prompt": "1"}], rewards={"reward": len}), stack)


def test_a_forgotten_scale_is_seen(tmp_path: Path) -> None:
    """The comparison above can fail: codes without their scales give other hidden states."""
    model = tiny_model("qwen2")
    quantise_layers(model, "fp8", CPU)
    policy = Policy(model, check=False)
    before = policy.probe()
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.scale.data.fill_(1.0)
    assert (policy.probe() - before).abs().max() > 0.1


def test_layers_of_which_only_some_are_in_codes_are_not_fused(tmp_path: Path) -> None:
    """Checkpoints may leave single layers out. What is joined is all in codes, or all plain."""
    model = in_codes(folder_of(tmp_path, "llama", hidden_size=256, intermediate_size=256), "fp8", "float32")
    attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
    attention.q_proj.base_layer = torch.nn.Linear(256, attention.q_proj.base_layer.out_features, bias=False)
    policy = Policy(model)
    with pytest.raises(Unfusable, match=r"only some of q_proj, k_proj, v_proj are stored in codes"):
        read_parts(policy, layer_shapes(policy))
