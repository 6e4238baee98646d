"""A shape read from a config has the parameters that the model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig

from tests.tiny import ARCHITECTURES, BASE, tiny_model
from trimtab.base.errors import ModelError
from trimtab.config.schema import Lora
from trimtab.model.adapters import add_adapters
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.plan.shape import FAMILIES, read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.run.shapes import measured_shape, shape_of, shape_of_model

ALL: dict[str, dict[str, Any]] = ARCHITECTURES


def test_every_family_is_compared() -> None:
    assert set(ALL) == FAMILIES


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ALL)
def test_parameters_are_counted_exactly(kind: str, tied: bool) -> None:
    config = AutoConfig.for_model(kind, **{**BASE, **ALL[kind], "tie_word_embeddings": tied})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    assert read_shape(config.to_dict()).parameters == total
    assert measured_shape(config).parameters == total


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_token_stores_what_the_engine_finds_it_stores(kind: str) -> None:
    policy = Policy(tiny_model(kind))
    stored = sum(shape.bytes_per_token(1) for shape in layer_shapes(policy, latents=True).values())
    assert read_shape(policy.config.to_dict()).kv_elements == stored
    windows = [shape.rules.window for shape in layer_shapes(policy).values()]
    assert [block.window for block in read_shape(policy.config.to_dict()).blocks] == windows


@pytest.mark.parametrize("biased", [True, False])
def test_biases_are_counted(biased: bool) -> None:
    config = AutoConfig.for_model("llama", **BASE, attention_bias=biased, mlp_bias=biased)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert read_shape(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def test_another_architecture_is_measured() -> None:
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
    )
    with pytest.raises(KeyError, match="gpt_neox"):
        read_shape(config.to_dict())
    shape = measured_shape(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) and shape.layers == 2


def test_layers_of_different_widths_are_measured() -> None:
    config = AutoConfig.for_model(
        "gemma3n_text", **BASE | {"intermediate_size": [48, 64, 48]}, head_dim=8, laurel_rank=4, num_kv_shared_layers=1,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=50, activation_sparsity_pattern=[0.0] * 3,
    )  # fmt: skip
    shape = measured_shape(config)
    assert [block.width for block in shape.blocks] == [48, 64, 48]
    assert sum(shape.kinds.values()) == 3


def test_layers_of_different_heads_are_measured() -> None:
    """Gemma 4: the config as a whole does not tell its head size."""
    config = AutoConfig.for_model(
        "gemma4_text", **BASE, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=4, vocab_size_per_layer_input=50,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], sliding_window=5,
    )  # fmt: skip
    assert [block.head_size for block in measured_shape(config).blocks] == [8, 8, 16]


def test_a_config_that_says_too_little_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_size, num_hidden_layers"):
        read_shape({"model_type": "llama", "num_attention_heads": 4, "vocab_size": 10})


@pytest.mark.parametrize(
    ("kind", "targets"),
    [(kind, ["k_proj", "down_proj"]) for kind in ("llama", "qwen2", "gemma2")]
    + [("phi3", ["qkv_proj", "down_proj"])]
    + [
        (kind, ["o_proj", "experts.down_proj"])
        for kind in ("qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen2_moe")
    ],
)
def test_adapters_are_counted_apart(kind: str, targets: list[str]) -> None:
    model = tiny_model(kind)
    before = shape_of_model(model)
    adapted = add_adapters(model, Lora(r=3), seed=0)
    assert shape_of_model(adapted).parameters == before.parameters
    assert before.lora_parameters(3) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    some = add_adapters(tiny_model(kind), Lora(r=3, targets=targets), seed=0)
    assert before.lora_parameters(3, targets) == sum(p.numel() for p in some.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.616), ("qwen2.5-72b", 72.706), ("qwen3-8b", 8.191), ("llama-3.1-70b", 70.554),
     ("llama-3.2-1b", 1.236), ("smollm2-135m", 0.1345), ("mistral-7b-v0.3", 7.248)],
)  # fmt: skip
def test_well_known_models_have_their_published_size(name: str, billions: float) -> None:
    assert read_shape(WELL_KNOWN[name]).parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_an_architecture_that_cannot_be_built_is_told_as_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose code needs a library that is not installed."""
    GPTNeoXConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=11).save_pretrained(tmp_path)

    def missing(config: object, **_: object) -> None:
        raise ImportError("\nThis model requires the timm library\nwhich is not here")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", missing)
    with pytest.raises(
        ModelError, match=r"a gpt_neox model cannot be built.*ImportError: This model requires the timm"
    ):
        shape_of(str(tmp_path))


def test_a_folder_is_found_in_the_home_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    tiny_model("llama").config.save_pretrained(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shape_of("~/m") == shape_of(str(tmp_path / "m"))
