"""Liger's kernels in one model and no other: what is patched, what is put back, and what is refused.

The package needs a GPU. Most of this runs with a stand-in for it that patches transformers as the real one does, with torch's own
functions; the last test takes the real one where it is installed.
"""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.llama import modeling_llama

from tests.tiny import tiny_model
from trimtab.base.errors import ConfigError
from trimtab.config.run import Run
from trimtab.config.schema import Model
from trimtab.model import kernel_choice, liger
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.run.build import refuse_kernels

LENGTHS = [9, 14, 5]


class Norm(torch.nn.Module):
    """As Liger's: one function, weights as they are."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Norm.calls += 1
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)

    calls = 0


def apply_to_llama(
    rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, model: Any = None
) -> None:
    """What liger-kernel 0.8 does to a model that is there: classes and functions of the whole process, then its modules."""
    assert rope and not cross_entropy and not fused_linear_cross_entropy, "the head is not Liger's"
    modeling_llama.apply_rotary_pos_emb = their_rotation
    modeling_llama.LlamaRMSNorm = Norm
    modeling_llama.left_behind = True
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.__dict__["forward"] = Norm.forward.__get__(norm, type(norm))


def their_rotation(*_: Any, **__: Any) -> Any:
    raise AssertionError("a CPU tensor got to a kernel")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, and a device check that lets a CPU pass."""
    made = types.ModuleType("liger_kernel.transformers.monkey_patch")
    made.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_to_llama}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(liger, "find_spec", lambda name: True)
    monkeypatch.setattr(liger, "version", lambda name: "0.8.5")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    Norm.calls = 0


def gradient(policy: Policy) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, policy.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    plan = PackedPlan(LENGTHS, policy.device, prefixes=[None, 0, None])
    hidden = policy.hidden(tokens, plan.positions, plan)
    stats = policy.head.token_stats(hidden[:-1].contiguous(), tokens[1:], 1.0, 8)
    (stats.logprobs * torch.linspace(-1, 1, len(tokens) - 1)).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys()
    scale = max(float(g.abs().max()) for g in one.values())
    for name in one:
        torch.testing.assert_close(
            two[name], one[name], atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("adapters", [False, True])
def test_a_patched_model_has_the_same_gradient_and_no_other_is_touched(
    stand_in: None, monkeypatch: pytest.MonkeyPatch, adapters: bool
) -> None:
    def made() -> Any:
        model = tiny_model("llama")
        settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(0)
        return get_peft_model(model, settings) if adapters else model

    monkeypatch.setattr(liger, "refuse", lambda kind, device: None)
    own, other = Policy(made()), Policy(made())
    norm, rotation = modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb
    expected = gradient(own)
    use_kernels(other, "liger")
    assert other.description == "the model's own modules with Liger's kernels" and Norm.calls > 0
    seen = Norm.calls
    assert_same(expected, gradient(other))
    assert Norm.calls > seen
    assert modeling_llama.LlamaRMSNorm is norm and not hasattr(modeling_llama, "left_behind")
    assert modeling_llama.apply_rotary_pos_emb.plain is rotation, "on a CPU the rotation is transformers' own"
    seen = Norm.calls
    gradient(own)
    assert Norm.calls == seen, "the first model runs as it did"
    again = Policy(made())
    use_kernels(again, "liger")
    assert modeling_llama.apply_rotary_pos_emb.plain is rotation, "patched twice, put back once"


def test_kernels_that_give_other_log_probs_are_refused(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "refuse", lambda kind, device: None)
    monkeypatch.setattr(Norm, "forward", lambda self, hidden: 1.5 * hidden)
    with pytest.raises(
        ConfigError, match=r"run\.kernels: Liger's kernels compute different log-probs for LlamaForCausalLM"
    ):
        use_kernels(Policy(tiny_model("llama")), "liger")


def test_what_cannot_work_is_refused_with_what_to_do(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run\.kernels: Liger's kernels need a CUDA device.*Write auto"):
        liger.refuse("llama", cpu)
    liger.refuse("llama", cuda)
    with pytest.raises(ConfigError, match=r"0\.8\.5 has no kernels for models of type opt.*It has some for llama"):
        liger.refuse("opt", cuda)
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'trimtab\[liger\]'"):
        liger.refuse("llama", cuda)


@pytest.mark.parametrize("kernels", ["liger", "native"])
def test_a_run_on_a_cpu_is_refused_before_weights_are_read(model_folder: Path, kernels: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.kernels: .* need a CUDA device"):
        refuse_kernels(Run(kernels=kernels), Model(path=str(model_folder)), torch.device("cpu"))
    refuse_kernels(Run(kernels="plain"), Model(path=str(model_folder)), torch.device("cpu"))


def test_native_is_the_fused_layers_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.kernels: fused layers do not support this run: they need a CUDA device"
    ):
        use_kernels(Policy(tiny_model("llama")), "native")
    plain = Policy(tiny_model("llama"))
    monkeypatch.setattr(kernel_choice, "fuse", lambda _: pytest.fail("plain is plain"))
    use_kernels(plain, "plain")


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "granite", "olmo2"])
def test_the_real_package_patches_one_model_and_all_else_is_put_back(kind: str) -> None:
    """No kernel is run: those need a GPU (tests/gpu/test_liger_gpu.py), and Triton's interpreter does not take them."""
    model = tiny_model(kind, num_hidden_layers=2)
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    liger.patch(model)
    after = dict(vars(home))
    assert before.keys() == after.keys()
    changed = {name for name in after if after[name] is not before[name]}
    assert changed <= {liger.ROTATION}
    names = {module._get_name() for module in model.modules() if "forward" in vars(module)}
    assert "LigerRMSNorm" in names and any("GLU" in name for name in names)
    assert "forward" not in vars(model), "the head and the loss are not Liger's"
    gradient(Policy(tiny_model(kind, num_hidden_layers=2)))  # another model runs on the CPU as ever
    if changed:
        setattr(home, liger.ROTATION, before[liger.ROTATION])
