"""Other models than the contract's own: what a library computes as the trainer does is served, anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from tests.rollout.contract.engines import (
    DEVICE,
    NO_SGLANG,
    NO_VLLM,
    OUTSIDE,
    SHAPE,
    make_engine,
    sglang_python,
    vllm_python,
)
from tests.rollout.contract.test_contract import ask, collect, prompts, tokens
from trimtab.base.errors import EngineError
from trimtab.model.policy import Policy
from trimtab.rollout.external.reading import Reader
from trimtab.rollout.external.weights import SharedWeights, named_weights

needs_vllm = pytest.mark.skipif(vllm_python() is None, reason=NO_VLLM)


def policy_of(architecture: str, **changes: Any) -> Policy:
    return Policy(tiny_model(architecture, **SHAPE | changes).to(DEVICE))


@pytest.mark.parametrize(
    ("kind", "architecture", "changes"),
    [
        pytest.param(*kind.values, *case, marks=kind.marks)
        for kind in OUTSIDE
        for case in {
            "vllm": [("gemma2", {"head_dim": 32}), ("phi3", {})],
            "sglang": [("mixtral", {}), ("phi3", {"sliding_window": None})],
        }[str(kind.values[0])]
    ],
)
def test_weights_reach_architectures_with_other_layers_and_heads(
    kind: str, architecture: str, changes: dict[str, Any]
) -> None:
    """gemma2 has no head of its own in vLLM; phi3 has its projections in one; mixtral has experts."""
    policy = policy_of(architecture, **changes)
    engine, native = make_engine(kind, policy), make_engine("native", policy)
    requests = ask(prompts(3), samples=2)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter *= 1.1
        engine.publish(version)
        native.publish(version)
        assert tokens(collect(engine, requests)) == tokens(collect(native, requests))
    engine.close()


@pytest.mark.skipif(sglang_python() is None, reason=NO_SGLANG)
def test_an_engine_that_forgets_a_window_is_refused() -> None:
    """SGLang 0.5.17 lets every token of phi3 see all before it."""
    with pytest.raises(EngineError, match=r"compute different log-probs for Phi3ForCausalLM(.|\n)*run.engine: native"):
        make_engine("sglang", policy_of("phi3", sliding_window=6))


@needs_vllm
@pytest.mark.skipif(DEVICE.type == "cuda", reason="vLLM's CPU kernels are what is wrong")
def test_an_engine_whose_log_probs_are_others_is_refused() -> None:
    """vLLM 0.32 on a CPU does not reload experts."""
    with pytest.raises(
        EngineError, match=r"compute different log-probs for Qwen3MoeForCausalLM(.|\n)*run.engine: native"
    ):
        make_engine("vllm", policy_of("qwen3_moe", head_dim=32, moe_intermediate_size=32))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_experts_have_the_names_and_values_of_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Compared with what transformers itself saves; and no two of them share bytes."""
    policy = policy_of(architecture)
    policy.model.save_pretrained(tmp_path)
    saved, found = load_file(tmp_path / "model.safetensors"), dict(named_weights(policy))
    assert set(saved) <= set(found) and any("experts.3." in name for name in saved)
    assert all(torch.equal(found[name].cpu(), value) for name, value in saved.items())
    shared = SharedWeights(policy)
    published = shared.publish()
    assert published.file is not None and not shared.direct
    reader = Reader()
    reader.take(published)
    assert all(torch.equal(value, found[name].cpu()) for name, value in reader.read())
    shared.close()
