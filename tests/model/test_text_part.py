"""The text part of models that also see: on text alone it computes what the whole model does, and it finds its way back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, BASE, HYBRIDS, VOCABULARY, tiny_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from trimtab.base.errors import ModelError
from trimtab.config.schema import Lora, Model
from trimtab.model.adapters import add_adapters
from trimtab.model.load import load_config, load_model, save_model
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy, refuse_other_layers
from trimtab.model.text_part import WRAPPERS

SIZES = {name: value for name, value in BASE.items() if name != "num_hidden_layers"} | {"num_hidden_layers": 2}
SEES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_SEES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, "head_dim": 8}
GEMMA = ARCHITECTURES["gemma3_text"]
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
TINY: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": GEMMA, "vision_config": SEES, "mm_tokens_per_image": 4},
    "mistral3": {"text_config": {"model_type": "mistral", "head_dim": 8}, "vision_config": SEES | {"head_dim": 8}},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": SEES | {"model_type": "clip_vision_model"}},
    "llava_next": {"text_config": {"model_type": "llama"}, "vision_config": SEES | {"model_type": "clip_vision_model"}},
    "llava_onevision": {
        "text_config": {"model_type": "qwen2"},
        "vision_config": SEES | {"model_type": "siglip_vision_model"},
    },
    "idefics3": {"text_config": {"model_type": "llama"}, "vision_config": SEES, "scale_factor": 2, "pad_token_id": 0},
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": SEES, "scale_factor": 2, "pad_token_id": 0},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": SEES},
    "qwen2_vl": {
        "text_config": ROPE,
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32},
    },
    "qwen2_5_vl": {"text_config": ROPE, "vision_config": QWEN_SEES},
    "qwen3_vl": {"text_config": ROPE, "vision_config": QWEN_SEES | {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_moe": {"text_config": ROPE | EXPERTS, "vision_config": QWEN_SEES | {"deepstack_visual_indexes": [0]}},
    "gemma4": {
        "text_config": {
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
        },
        "vision_config": SEES | {"head_dim": 8, "num_key_value_heads": 2},
        "audio_config": None,
    },
}
STATES = {
    **{name: value for name, value in HYBRIDS["qwen3_5_text"].items() if name != "layer_types"},
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
}  # fmt: skip
TINY["qwen3_5"] = {"text_config": STATES, "vision_config": QWEN_SEES}
TINY["qwen3_5_moe"] = {
    "text_config": STATES | EXPERTS | {"shared_expert_intermediate_size": 24}, "vision_config": QWEN_SEES,
}  # fmt: skip
TINY["gemma4_unified"] = TINY["gemma4"] | {
    "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4, "patch_size": 4, "output_proj_dims": 32}
}


def tiny_seeing(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a few thousand parameters that reads images, too."""
    settings = dict(TINY[kind])
    settings["text_config"] = SIZES | settings["text_config"]
    config = AutoConfig.for_model(kind, **settings | changes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("kind", TINY)
def test_the_text_part_is_the_whole_model_on_text(kind: str, tmp_path: Path) -> None:
    whole = tiny_seeing(kind, torch.float64)
    whole.save_pretrained(tmp_path)
    model = Model(path=str(tmp_path), dtype="float64")
    refuse_other_layers(model)
    policy = Policy(load_model(model, torch.device("cpu")))
    assert type(policy.config) is type(load_config(model))
    rows = [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 12)]
    plan = PackedPlan([9, 12], "cpu")
    with torch.no_grad():
        found = policy.head.logits(policy.hidden(torch.cat(rows), plan.positions, plan))
        expected = torch.cat([whole(input_ids=row[None], use_cache=False).logits[0] for row in rows])
    exact = 2e-6 if kind not in ("qwen3_5", "qwen3_5_moe") else 2e-4  # their delta rule computes in float32
    torch.testing.assert_close(found.double(), expected, atol=exact, rtol=0)
    assert sum(p.numel() for p in policy.model.parameters()) < sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [("aya_vision", {"model_type": "cohere2"}, r"aya_vision model, which is more.*text part \(cohere2\)(.|\n)*gemma3"),
     ("llama4", {}, r"llama4 model, which is more.*text part \(llama4_text\)")],
)  # fmt: skip
def test_a_text_part_that_is_not_known_is_refused_by_name(
    kind: str, text: dict[str, Any], told: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind, text_config=SIZES | text).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        load_config(Model(path=str(tmp_path)))


@pytest.mark.parametrize(("kind", "adapted"), [(kind, False) for kind in TINY] + [("gemma3", True)])
def test_an_export_is_the_whole_model_with_the_trained_text(kind: str, adapted: bool, tmp_path: Path) -> None:
    """It loads as the original's class; its vision part is as it was."""
    origin, folder = tmp_path / "origin", tmp_path / "final"
    whole = tiny_seeing(kind)
    whole.save_pretrained(origin)
    (origin / "preprocessor_config.json").write_text("{}")
    model: Any = load_model(Model(path=str(origin), dtype="float32"), torch.device("cpu"))
    if adapted:
        model = add_adapters(model, Lora(r=2), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02
    save_model(model, tiny_tokenizer(), folder)
    again = type(whole).from_pretrained(folder, dtype=torch.float32).eval()
    text, seeing = (
        {id(p) for p in (*one.get_decoder().parameters(), *one.get_output_embeddings().parameters())}
        for one in (whole, again)
    )
    before = {name: p for name, p in whole.named_parameters() if id(p) not in text}
    after = {name: p for name, p in again.named_parameters() if id(p) not in seeing}
    assert before and before.keys() == after.keys() and all(torch.equal(p, after[name]) for name, p in before.items())
    row = torch.randint(3, VOCABULARY, (1, 9))
    with torch.no_grad():
        found = again(input_ids=row, use_cache=False).logits
        torch.testing.assert_close(found, model.eval()(input_ids=row, use_cache=False).logits, atol=2e-5, rtol=0)
        assert not torch.allclose(found, whole(input_ids=row, use_cache=False).logits, atol=1e-2)
    assert (folder / "preprocessor_config.json").is_file() and (folder / "tokenizer.json").is_file()
    load_model(Model(path=str(folder)), torch.device("cpu"))


def renamed(folder: Path, rename: Callable[[str], str], turn: str = "") -> None:
    """The checkpoint as older releases stored it: other names, and tensors whose name contains `turn` the other way round."""
    file = folder / "model.safetensors"
    held = {
        rename(name): x.transpose(1, 2).contiguous() if turn and turn in name else x
        for name, x in load_file(file).items()
    }
    save_file(held, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "before", "after", "turn"),
    [
        ("gemma3", r"^model\.language_model", "language_model.model", ""),
        (
            "qwen2_5_vl",
            r"^(model|visual)\.",
            lambda m: {"model": "model.language_model.", "visual": "model.visual."}[m[1]],
            "",
        ),
        ("qwen3_vl_moe", "^$", "", ".experts."),
    ],
)
def test_checkpoints_as_they_were_published(kind: str, before: str, after: Any, turn: str, tmp_path: Path) -> None:
    tiny_seeing(kind).save_pretrained(tmp_path)
    model = Model(path=str(tmp_path))
    expected = load_model(model, torch.device("cpu")).state_dict()
    renamed(tmp_path, lambda name: re.sub(before, after, name), turn)
    found = load_model(model, torch.device("cpu")).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(x, found[name]) for name, x in expected.items())


def test_every_family_that_is_served_is_compared() -> None:
    assert set(TINY) == WRAPPERS
