"""Adapters: new ones change nothing, trained ones are saved, read back and merged exactly, others are refused by name."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from trimtab.base.errors import ConfigError
from trimtab.config.schema import Lora
from trimtab.model.adapters import (
    add_adapters,
    load_adapters,
    refuse_unknown_targets,
    save_adapters,
)
from trimtab.model.load import save_model
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy, WithoutAdapters

TOKENS = torch.arange(3, 14)


def hidden(policy: Policy | WithoutAdapters) -> torch.Tensor:
    plan = PackedPlan([len(TOKENS)], "cpu")
    with torch.no_grad():
        return policy.hidden(TOKENS, plan.positions, plan)


def trained(model) -> None:
    """As if adapters had learned something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))


def test_new_adapters_add_nothing_and_freeze_the_rest() -> None:
    plain = hidden(Policy(tiny_model("qwen2")))
    policy = Policy(add_adapters(tiny_model("qwen2"), Lora(r=2), seed=0))
    assert torch.equal(hidden(policy), plain)
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)


def test_the_seed_decides_how_adapters_begin() -> None:
    state = torch.random.get_rng_state()
    models = [add_adapters(tiny_model("qwen2"), Lora(r=2), seed) for seed in (0, 0, 1)]
    one, same, other = (next(p for name, p in m.named_parameters() if "lora_A" in name) for m in models)
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_reference_is_the_model_without_them() -> None:
    plain = hidden(Policy(tiny_model("qwen2")))
    policy = Policy(add_adapters(tiny_model("qwen2"), Lora(r=2), seed=0))
    trained(policy.model)
    assert not torch.allclose(hidden(policy), plain)
    assert torch.equal(hidden(WithoutAdapters(policy)), plain)
    assert not torch.allclose(hidden(policy), plain)


def test_without_alpha_what_adapters_add_is_doubled() -> None:
    for settings, scale in ((Lora(r=3), 2.0), (Lora(r=8), 2.0), (Lora(r=4, alpha=6), 1.5)):
        model = add_adapters(tiny_model("qwen2"), settings, seed=0)
        assert {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")} == {scale}


def test_saved_and_read_back_they_are_the_same(tmp_path) -> None:
    policy = Policy(add_adapters(tiny_model("qwen2"), Lora(r=3, alpha=7), seed=0))
    trained(policy.model)
    save_adapters(policy.model, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    back = Policy(load_adapters(tiny_model("qwen2"), tmp_path))
    assert torch.equal(hidden(back), hidden(policy))
    assert [n for n, p in back.model.named_parameters() if p.requires_grad] == [
        n for n, p in policy.model.named_parameters() if p.requires_grad
    ]


@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "gemma2"])
def test_an_exported_model_has_them_merged_in(architecture: str, tmp_path) -> None:
    policy = Policy(add_adapters(tiny_model(architecture), Lora(r=2), seed=0))
    trained(policy.model)
    save_model(policy.model, tiny_tokenizer(), tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(exported) is type(policy.model.get_base_model())
    torch.testing.assert_close(hidden(Policy(exported)), hidden(policy), atol=1e-5, rtol=1e-5)
    assert hasattr(policy.model.get_base_model().model.layers[0].self_attn.o_proj, "lora_A")  # training can go on


def test_a_mixtures_stacked_weights_are_targets() -> None:
    """And linear layers whose names PEFT takes for experts' are none."""
    mixture = tiny_model("deepseek_v2").config
    for targets in ("all-linear", ["q_proj", "down_proj"], ["experts.gate_up_proj"]):
        refuse_unknown_targets(Lora(r=2, targets=targets), mixture, False)
    with pytest.raises(ConfigError, match=r"no linear layer up_proj\. Choose from: down_proj, gate_up_proj, kv_a_proj"):
        refuse_unknown_targets(Lora(r=2, targets=["up_proj"]), mixture, False)
    refuse_unknown_targets(Lora(r=2), tiny_model("llama").config, False)


def test_targets_may_be_named_and_unknown_ones_are_refused() -> None:
    model = add_adapters(tiny_model("qwen2"), Lora(r=2, targets=["q_proj", "v_proj"]), seed=0)
    found = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert found == {"q_proj", "v_proj"}
    config = tiny_model("qwen2").config
    for served in (Lora(), Lora(targets=["q_proj", "mlp.up_proj"])):
        refuse_unknown_targets(served, config, False)
    there = "Choose from: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj. Or write all-linear."
    with pytest.raises(
        ConfigError, match=f"model.lora.targets: Qwen2ForCausalLM has no linear layer a_proj, b. {there}"
    ):
        refuse_unknown_targets(Lora(targets=["q_proj", "a_proj", "b"]), config, False)
    with pytest.raises(ConfigError, match="the list is empty"):
        refuse_unknown_targets(Lora(targets=[]), config, False)


def test_layers_that_store_their_weights_the_other_way_are_merged_too(tmp_path) -> None:
    """GPT-2's linear layers are [inputs, outputs]."""
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    refuse_unknown_targets(Lora(targets=["c_attn"]), config, False)
    model = add_adapters(GPT2LMHeadModel(config).eval(), Lora(r=2), seed=0)
    trained(model)
    save_model(model, tiny_tokenizer(), tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        found, expected = exported(TOKENS[None]).logits, model(TOKENS[None]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
