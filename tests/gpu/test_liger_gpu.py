"""`run.kernels` on a CUDA device: native, liger and plain have one gradient, as near to float64 as the model's own modules."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from tests.gpu.test_update_gpu import distance, gradients
from trimtab.config.load import config_from_dict
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.policy import Policy
from trimtab.plan.activations import MicroBatchSize, UpdatePath, update_peak
from trimtab.run import loop
from trimtab.run.inputs import Inputs
from trimtab.run.session import open_session
from trimtab.run.shapes import shape_of_model

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def compared(model: Any, kinds: tuple[str, ...]) -> None:
    model = model.to(torch.bfloat16)
    exact_logprobs, exact = gradients(Policy(copy.deepcopy(model).double().cuda(), check=False))
    found = {}
    for kernels in ("plain", *kinds):
        policy = Policy(copy.deepcopy(model).cuda())
        use_kernels(policy, kernels)
        found[kernels] = gradients(policy)
        assert (kernels == "native") == policy.fused and ("Liger" in policy.description) == (kernels == "liger")
    own_logprobs, own = found["plain"]
    for kernels in kinds:
        logprobs, gradient = found[kernels]
        assert (logprobs - exact_logprobs).abs().mean() <= 1.2 * (own_logprobs - exact_logprobs).abs().mean() + 1e-4
        assert distance(gradient, exact) <= 1.2 * distance(own, exact) + 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "granite"])
def test_gradients_are_those_of_the_modules(architecture: str) -> None:
    compared(tiny_model(architecture, num_hidden_layers=3), ("native", "liger"))


def test_where_there_are_no_fused_layers_liger_serves_all_the_same() -> None:
    compared(tiny_model("olmo2", num_hidden_layers=3), ("liger",))


def test_adapters_too() -> None:
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    compared(get_peft_model(tiny_model("qwen2", num_hidden_layers=3), settings), ("native", "liger"))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_step_is_the_same(model_folder: Path, tmp_path: Path, recompute: bool) -> None:
    """Sampled once, then the update of those samples with each kind of kernels, in bfloat16: law 1 up to its rounding."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    kept: list[Any] = []
    for kernels in ("plain", "native", "liger"):
        tree = {
            "model": {"path": str(model_folder), "dtype": "bfloat16"},
            "data": {"train": "object:rows"},
            "reward": [{"fn": "object:reward"}],
            "learn": {"prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 24, "max_grad_norm": None},
            "run": {"device": "cuda", "kernels": kernels, "checkpoint_activations": recompute},
            "observe": {"dir": str(tmp_path / f"{kernels}-{recompute}"), "tensorboard": False},
        }
        rows = [{"prompt": f"{a}+{a}="} for a in range(6)]
        inputs = Inputs(
            train_rows=rows, rewards={"reward": lambda completions, **_: [float(len(set(c))) for c in completions]}
        )
        with ExitStack() as stack:
            session = open_session(config_from_dict(tree), inputs, stack)
            kept = kept or session.buffer.next(session).groups
            own = found.setdefault(kernels, {})
            apply = session.trainer.updater.optimizer.apply

            def capture(lr: float, session: Any = session, own: Any = own, apply: Any = apply) -> Any:
                for (name, _), grad in zip(
                    session.trainer.updater.policy.model.named_parameters(), session.trainer.updater.optimizer.grads()
                ):
                    own[name] = grad.double().clone()
                return apply(lr)

            session.trainer.updater.optimizer.apply = capture
            loop.update(session, kept)
    for kernels in ("native", "liger"):
        assert distance(found[kernels], found["plain"]) < 0.05


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_stays_below_what_is_counted(recompute: bool) -> None:
    """And is less than that of the plain modules where nothing is made again."""
    peaks = {}
    for kernels in ("plain", "liger"):
        model = tiny_model(
            "llama", num_hidden_layers=8, hidden_size=512, intermediate_size=2048, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=8192, vocab_size=1024,
        )  # fmt: skip
        policy = Policy(model.to(torch.bfloat16).cuda())
        use_kernels(policy, kernels)
        if recompute:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        from trimtab.model.packed import PackedPlan

        tokens = torch.randint(0, 1024, (4096,)).cuda()
        plan = PackedPlan([1024] * 4, "cuda")

        def passes(policy: Policy = policy, plan: Any = plan, tokens: torch.Tensor = tokens) -> None:
            hidden = policy.hidden(tokens, plan.positions, plan)
            policy.head.token_stats(hidden[:-1].contiguous(), tokens[1:], 1.0, 512).logprobs.sum().backward()

        passes()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        passes()
        peaks[kernels] = torch.cuda.max_memory_allocated() - before
        row = MicroBatchSize(4096, 4095, 4096, 4)
        counted = update_peak(
            shape_of_model(policy.model),
            row,
            UpdatePath(2, False, recompute, 512, policy.tiled_head, liger=kernels == "liger"),
        )
        assert peaks[kernels] <= 1.1 * sum(counted.values())
    if not recompute:
        assert peaks["liger"] < 0.95 * peaks["plain"]
