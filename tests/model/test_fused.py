"""The fused training forward and its gradient against the model's own modules in float64, for every architecture it serves.

Without a CUDA device the kernels run in Triton's interpreter, with one they are compiled.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

pytest.importorskip("triton", reason="Triton is not installed")

from trimtab.model.activation_offload import ActivationOffload
from trimtab.model.fused import FusedForward
from trimtab.model.gradients import Gradients
from trimtab.model.keep import Keep
from trimtab.model.packed import PackedPlan, _Copies, copies_of
from trimtab.model.parts import Unfusable
from trimtab.model.policy import Policy
from trimtab.model.sizes import FUSED_FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = [5, 3, 4]


def row(policy: Policy) -> tuple[torch.Tensor, PackedPlan]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, policy.config.vocab_size, (sum(LENGTHS),), generator=generator)
    tokens[2] = policy.config.pad_token_id or 0  # its embedding does not learn in transformers' modules
    return tokens.to(DEVICE), PackedPlan(LENGTHS, DEVICE, prefixes=[None, 0, None])


def gradients(policy: Policy, forward) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states, and the gradient of a sum over them with weights of both signs."""
    tokens, plan = row(policy)
    hidden = forward(tokens, plan)
    weights = torch.linspace(-1.0, 1.0, hidden.numel(), device=DEVICE, dtype=hidden.dtype).view_as(hidden)
    (hidden * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return hidden.detach(), found


def both(model) -> tuple[Policy, Policy]:
    """The model in float32 and, with the same weights, in float64."""
    exact = Policy(copy.deepcopy(model).double().to(DEVICE), check=False)
    return Policy(model.float().to(DEVICE), check=False), exact


def compare(policy: Policy, exact: Policy) -> None:
    fused = FusedForward(policy)
    hidden, grads = gradients(policy, lambda tokens, plan: fused(tokens, plan.positions, max(LENGTHS) * 2, plan))
    expected, exact_grads = gradients(exact, lambda tokens, plan: exact.hidden(tokens, plan.positions, plan))
    torch.testing.assert_close(hidden.double(), expected, atol=2e-5, rtol=2e-5)
    assert grads.keys() == exact_grads.keys()
    for name, grad in grads.items():
        size = exact_grads[name].abs().max().item()
        torch.testing.assert_close(grad.double(), exact_grads[name], atol=2e-5 * max(size, 1e-3), rtol=1e-4, msg=name)


LIKE_OTHERS = ("cohere", "exaone4", "gemma", "glm", "ministral", "olmo2", "seed_oss", "vaultgemma")


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.slow if each in LIKE_OTHERS else ()) for each in sorted(FUSED_FAMILIES)],
)
def test_gradient_equals_the_models_own(architecture: str) -> None:
    compare(*both(tiny_model(architecture, num_hidden_layers=2)))


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("qwen2", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        "gemma2",
        pytest.param("cohere2", marks=pytest.mark.slow),
        pytest.param("olmo3", marks=pytest.mark.slow),
        "adapters",
        "qwen3_moe",
    ],
)
def test_what_is_kept_changes_memory_and_nothing_else(architecture: str) -> None:
    model = tiny_model("llama" if architecture == "adapters" else architecture, num_hidden_layers=2)
    if architecture == "adapters":
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    policy, _ = both(model)
    fused = FusedForward(policy)
    found, sizes = {}, {}
    for keep in Keep:
        policy.keep, kept = keep, {}
        found[keep] = gradients(policy, lambda tokens, plan: fused(tokens, plan.positions, 16, plan))
        tokens, plan = row(policy)
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_remember, kept), lambda x: x):
            fused(tokens, plan.positions, 16, plan)
        sizes[keep] = sum(kept.values())
    for keep in (Keep.SOME, Keep.INPUT):
        assert torch.equal(found[keep][0], found[Keep.ALL][0])
        assert found[keep][1].keys() == found[Keep.ALL][1].keys()
        assert all(torch.equal(grad, found[Keep.ALL][1][name]) for name, grad in found[keep][1].items())
    assert sizes[Keep.ALL] > 1.2 * sizes[Keep.SOME] > 2 * sizes[Keep.INPUT], sizes


def test_layer_inputs_that_wait_in_host_memory_change_nothing() -> None:
    policy, _ = both(tiny_model("qwen3", num_hidden_layers=3))
    fused = FusedForward(policy)
    found = []
    policy.keep = Keep.INPUT
    for activation_offload in (None, ActivationOffload(DEVICE)):
        policy.activation_offload = activation_offload
        for _ in range(2):
            found.append(gradients(policy, lambda tokens, plan: fused(tokens, plan.positions, 16, plan)))
    assert policy.activation_offload is not None and len(policy.activation_offload._free) == 3
    with torch.no_grad():
        tokens, plan = row(policy)
        assert torch.equal(fused(tokens, plan.positions, 16, plan), found[0][0])
    assert not policy.activation_offload._waiting
    for hidden, grads in found[1:]:
        assert torch.equal(hidden, found[0][0])
        assert all(torch.equal(grad, found[0][1][name]) for name, grad in grads.items())


def _remember(kept: dict[int, int], x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.nn.Parameter):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return x


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text", "adapters"])
def test_products_add_to_the_sums_of_a_step(architecture: str) -> None:
    """Twice the same pass: each sum is twice what autograd gives, and autograd gives nothing more."""
    model = tiny_model("llama" if architecture == "adapters" else architecture, num_hidden_layers=2)
    if architecture == "adapters":
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    policy, _ = both(model)
    fused = FusedForward(policy)

    def forward(tokens, plan):
        hidden = fused(tokens, plan.positions, 16, plan)
        stats = policy.head.token_stats(hidden, tokens, 0.9, 5, policy.gradients)
        return stats.logprobs + 0.1 * stats.entropy

    _, expected = gradients(policy, forward)
    trained = [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]
    policy.gradients = Gradients(policy.weights, [p for _, p in trained])
    for _ in range(2):
        _, held = gradients(policy, forward)
        # The embedding's and the first norm's come from autograd, as a hook of the optimizer would see them.
        for name, parameter in trained:
            if name in held:
                parameter.grad = held[name]
                policy.gradients.add(parameter)
    assert set(held) <= {n for n, _ in trained if "embed" in n or "layers.0.input_layernorm" in n}
    for name, parameter in trained:
        torch.testing.assert_close(policy.gradients.get(parameter), 2 * expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_adapters_have_the_gradient_and_frozen_weights_none(architecture: str) -> None:
    model = tiny_model(architecture, num_hidden_layers=2)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False))
    policy, exact = both(model)
    compare(policy, exact)
    assert all("lora" in name for name, p in policy.model.named_parameters() if p.requires_grad)


def test_frozen_parts_have_no_gradient() -> None:
    model = tiny_model("qwen3", num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "v_proj" in name or "q_norm" in name or "layernorm" in name
    compare(*both(model))


def test_a_row_sums_to_the_gradient_of_its_parts() -> None:
    """More tokens than programs: every one of them is counted once."""
    from trimtab.model.kernels import train

    policy, _ = both(tiny_model("gemma3_text", num_hidden_layers=1))
    fused = FusedForward(policy)
    whole = gradients(policy, lambda tokens, plan: fused(tokens, plan.positions, 16, plan))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TOKEN_SUM_PROGRAMS", 5)
        parts = gradients(policy, lambda tokens, plan: fused(tokens, plan.positions, 16, plan))
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1], atol=1e-5, rtol=1e-5)


def test_what_is_not_served_is_said() -> None:
    with pytest.raises(Unfusable, match="not tested with the architecture"):
        FusedForward(Policy(tiny_model("ernie4_5", num_hidden_layers=1).to(DEVICE), check=False))


def test_adapters_switched_off_and_on_are_followed() -> None:
    model = get_peft_model(
        tiny_model("llama", num_hidden_layers=1), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    policy, exact = both(model)
    fused = FusedForward(policy)
    tokens, plan = row(policy)
    with torch.no_grad():
        for _ in range(2):
            for state in (True, False):
                with contextlib.nullcontext() if state else policy.model.disable_adapter():
                    found = fused(tokens, plan.positions, 16, plan)
                with contextlib.nullcontext() if state else exact.model.disable_adapter():
                    expected = exact.hidden(tokens, plan.positions, plan)
                torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("assign", [False, True])
def test_parameters_put_elsewhere_are_followed(assign: bool) -> None:
    policy, _ = both(tiny_model("qwen2", num_hidden_layers=1))
    fused = FusedForward(policy)
    if assign:
        policy.body.load_state_dict({k: v * 1.5 for k, v in policy.body.state_dict().items()}, assign=True)
    else:
        for parameter in policy.model.parameters():
            parameter.data = parameter.data * 1.5
    tokens, plan = row(policy)
    with torch.no_grad():
        found, expected = fused(tokens, plan.positions, 16, plan), policy.hidden(tokens, plan.positions, plan)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_rows_that_are_taken_several_times_add_up_in_float32() -> None:
    """Sixteen small gradients beside a large one, which bfloat16 would lose one by one."""
    x = torch.zeros(5, 8, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    rows = torch.tensor([3, *[1] * 17, 0], device=DEVICE)
    out = _Copies.apply(x, rows, *copies_of(rows, 5))
    weights = torch.full((19, 8), 0.25, device=DEVICE)
    weights[1] = 256.0
    (out.float() * weights).sum().backward()
    expected = torch.tensor([0.25, 260.0, 0.0, 0.25, 0.0], device=DEVICE)
    assert torch.equal(x.grad.float(), expected[:, None].expand(5, 8))


def test_copies_of_a_row_add_up() -> None:
    x = torch.randn(sum(LENGTHS), 2, 3, device=DEVICE)
    plan = PackedPlan(LENGTHS, DEVICE, prefixes=[None, 0, 0])
    weights = torch.randn(5 + 8 + 9, 2, 3, device=DEVICE)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    copies = _Copies.apply(found, plan._keys_seen, *plan._copies)
    plain = expected.index_select(0, plan._keys_seen)
    assert torch.equal(copies, plain)
    (copies * weights).sum().backward()
    (plain * weights).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
