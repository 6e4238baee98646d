"""Experts as grouped products: what transformers' own loop computes, forward and gradient, with adapters on them and without.

Without a CUDA device the kernels run in Triton's interpreter, with one they are compiled.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trimtab.config.schema import Lora
from trimtab.model import grouped
from trimtab.model.adapters import add_adapters, load_adapters, save_adapters
from trimtab.model.experts import EXPERTS_NAME, expert_modules, use_grouped_experts
from trimtab.model.gradients import Gradients
from trimtab.model.grouped import ExpertOrder
from trimtab.model.load import save_model
from trimtab.model.packed import PackedPlan
from trimtab.model.parts import run_mixture
from trimtab.model.policy import Policy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXTURES = ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen2_moe"]
TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def passes(model, weights=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradient of a sum over them with weights of both signs."""
    model.zero_grad()
    logp = model(input_ids=TOKENS.to(DEVICE)).logits.log_softmax(-1)
    weights = torch.linspace(-1, 1, logp.numel(), dtype=logp.dtype, device=DEVICE).view_as(logp)
    (logp * weights).sum().backward()
    return logp.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one, two, tolerance: float) -> None:
    torch.testing.assert_close(one[0].double(), two[0].double(), atol=tolerance, rtol=0)
    assert one[1].keys() == two[1].keys() and one[1]
    for name, grad in one[1].items():
        size = max(grad.abs().max().item(), 1e-3)
        torch.testing.assert_close(grad.double(), two[1][name].double(), atol=tolerance * size, rtol=0, msg=name)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_grouped_products_compute_what_the_models_own_experts_do(architecture: str) -> None:
    model = tiny_model(architecture, dtype=torch.float64, num_hidden_layers=2).to(DEVICE)
    own = passes(model)
    use_grouped_experts(model)
    assert model.config._experts_implementation == EXPERTS_NAME and expert_modules(model)
    assert_same(own, passes(model), 1e-11)


def test_a_token_that_goes_to_the_neighbours_expert_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: one pair more in one expert, one less in the next."""
    model = tiny_model("qwen3_moe", dtype=torch.float64, num_hidden_layers=2).to(DEVICE)
    own, right = passes(model), ExpertOrder.of.__func__

    def wrong(cls, index_TK, experts):
        order = right(cls, index_TK, experts)
        order.ends_G[0] += 1
        return order

    monkeypatch.setattr(ExpertOrder, "of", classmethod(wrong))
    use_grouped_experts(model)
    with pytest.raises(AssertionError):
        assert_same(own, passes(model), 1e-3)


def test_every_policy_runs_its_experts_so_and_is_compared_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Policy(tiny_model("qwen3_moe")).model.config._experts_implementation == EXPERTS_NAME
    right = ExpertOrder.combine
    monkeypatch.setattr(ExpertOrder, "combine", lambda order, y, weights=None: right(order, y.roll(1, 0), weights))
    with pytest.raises(Exception, match="computes different log-probs when sequences are packed"):
        Policy(tiny_model("qwen3_moe"))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_added_to_the_sums_of_the_step_in_float32(architecture: str) -> None:
    policy = Policy(tiny_model(architecture, num_hidden_layers=1).to(DEVICE, torch.bfloat16), check=False)
    exact = copy.deepcopy(policy.model).double()
    sums = Gradients(policy.weights, policy.parameters())
    plan = PackedPlan([5, 4], DEVICE)

    def backward(model_policy: Policy) -> None:
        hidden = model_policy.hidden(TOKENS[0].to(DEVICE), plan.positions, plan)
        weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype, device=DEVICE).view_as(hidden)
        (hidden * weights).sum().backward()

    policy.add_gradients_to(sums)
    backward(policy)
    once = {n: sums.get(p).clone() for n, p in policy.model.named_parameters() if ".experts." in n}
    assert once and all(grad.dtype == torch.float32 and grad.any() for grad in once.values())
    backward(policy)
    for name, parameter in policy.model.named_parameters():
        if name in once:
            assert parameter.grad is None
            torch.testing.assert_close(sums.get(parameter), 2 * once[name])
    exact_policy = Policy(exact, check=False)
    backward(exact_policy)
    for name, grad in once.items():
        whole = dict(exact.named_parameters())[name].grad
        assert (grad.double() - whole).norm() < 0.1 * whole.norm(), name


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_adapters_on_experts_add_what_pefts_do(architecture: str, tmp_path) -> None:
    """Forward, gradient, saved and read by PEFT alone, and merged."""
    base = tiny_model(architecture, num_hidden_layers=2)
    policy = Policy(add_adapters(copy.deepcopy(base), Lora(r=3), seed=0), check=False)
    model, numbers = policy.model.double().to(DEVICE), torch.Generator().manual_seed(2)
    model.set_attn_implementation("eager")
    on_experts = [name for name, p in model.named_parameters() if p.requires_grad and ".experts." in name]
    assert on_experts
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))
    beside = passes(model)
    assert all(beside[1][name].any() for name in on_experts)
    use_grouped_experts(model, False)
    assert_same(passes(model), beside, 1e-9)
    save_adapters(model, tmp_path / "adapters")
    settings = LoraConfig.from_pretrained(tmp_path / "adapters")
    assert sorted(settings.target_parameters) == ["experts.down_proj", "experts.gate_up_proj"]
    again = load_adapters(base, tmp_path / "adapters")
    torch.testing.assert_close(
        again.double()(input_ids=TOKENS).logits.log_softmax(-1).to(DEVICE), beside[0], atol=1e-5, rtol=0
    )
    save_model(model, tiny_tokenizer(), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, experts_implementation="eager"
    )
    torch.testing.assert_close(merged(input_ids=TOKENS).logits.log_softmax(-1).to(DEVICE), beside[0], atol=1e-5, rtol=0)
    with model.disable_adapter(), torch.no_grad():
        plain = model(input_ids=TOKENS.to(DEVICE)).logits.log_softmax(-1)
    assert not torch.allclose(plain, beside[0])


def test_targets_may_name_stacked_weights() -> None:
    model = add_adapters(tiny_model("qwen3_moe"), Lora(r=2, targets=["q_proj", "experts.down_proj"]), seed=0)
    found = {name for name, p in model.named_parameters() if p.requires_grad and ".layers.0." in name}
    assert (
        sum(".q_proj." in name for name in found) == 2 == sum(".experts." in name for name in found) and len(found) == 4
    )
    assert isinstance(get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"])), torch.nn.Module)


def cases(rows: int, experts: int, inputs: int, outputs: int) -> tuple[torch.Tensor, ...]:
    numbers = torch.Generator().manual_seed(rows)
    index = torch.randint(0, max(1, experts - 1), (rows, 2), generator=numbers)  # the last expert has nothing to do
    x, dout = (torch.randn(2 * rows, n, generator=numbers) for n in (inputs, outputs))
    return (
        index.to(DEVICE),
        x.to(DEVICE),
        dout.to(DEVICE),
        torch.randn(experts, inputs, outputs, generator=numbers).to(DEVICE),
    )


@pytest.mark.parametrize(("rows", "experts", "inputs", "outputs"), [(1, 5, 24, 20), (70, 3, 40, 72), (40, 4, 33, 130)])
def test_kernels_compute_what_a_loop_over_experts_does(rows: int, experts: int, inputs: int, outputs: int) -> None:
    kernels = pytest.importorskip("trimtab.model.kernels.grouped", reason="Triton is not installed")
    index, x, dout, w = cases(rows, experts, inputs, outputs)
    order = ExpertOrder.of(index, experts)
    expected = torch.stack([row @ w[expert] for row, expert in zip(x, order.expert_S)])
    torch.testing.assert_close(kernels.product(x, w, order.ends_G), expected, atol=1e-4, rtol=1e-4)
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(kernels.product(x, turned, order.ends_G), expected, atol=1e-4, rtol=1e-4)
    total = torch.ones(experts, outputs, inputs, device=DEVICE)
    kernels.add_outer(total, dout, x, order.ends_G)
    grown = torch.ones_like(total)
    for row, (a, b) in enumerate(zip(dout, x)):
        grown[order.expert_S[row]] += torch.outer(a, b)
    torch.testing.assert_close(total, grown, atol=1e-4, rtol=1e-4)
    weights = torch.rand(index.shape, device=DEVICE)
    for share in (None, weights):
        by_hand = (x[order.back_S].unflatten(0, (-1, 2)) * (1 if share is None else share[..., None])).sum(1)
        torch.testing.assert_close(kernels.combine(x, order.back_S, share, 2), by_hand, atol=1e-5, rtol=1e-5)


def test_with_kernels_a_whole_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny_model("qwen3_moe", num_hidden_layers=1).to(DEVICE)
    own = passes(copy.deepcopy(model).double())
    use_grouped_experts(model)
    monkeypatch.setattr(grouped, "_by_kernels", lambda _: True)
    assert_same(own, passes(model), 1e-4)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_no_routing_is_asked_of_the_host(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph records: no values read, no shapes that depend on them, forward and backward."""
    pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny_model(architecture, num_hidden_layers=2).to(DEVICE)
    use_grouped_experts(model)
    monkeypatch.setattr(grouped, "_by_kernels", lambda _: True)
    from trimtab.model.kernels import grouped as kernels

    for name in ("product", "add_outer", "combine"):  # the interpreter itself reads values
        monkeypatch.setattr(kernels, name, _shaped(name))
    x = torch.randn(6, 32, device=DEVICE, requires_grad=True)
    index = torch.randint(0, 4, (6, 2), device=DEVICE)
    with NoHost():
        run_mixture(model.model.layers[1].mlp, x).sum().backward()
    with pytest.raises(AssertionError, match="host"), NoHost():
        index.tolist()
    with pytest.raises(AssertionError, match="host"), NoHost():
        (index > 1).nonzero()


def _shaped(name: str):
    if name == "product":
        return lambda x, w, ends: x.new_ones((x.shape[0], w.shape[2]))
    if name == "add_outer":
        return lambda total, a, b, ends: None
    return lambda y, back, weights, used: y.new_ones((back.shape[0] // used, y.shape[1]))


class NoHost(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses operations for which the host waits for a device's values."""

    ASKING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "equal",
        "bincount",
        "repeat_interleave",
    )

    def __enter__(self):
        self._tolist = torch.Tensor.tolist
        torch.Tensor.tolist = self._refuse
        return super().__enter__()

    def __exit__(self, *args):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*args)

    @staticmethod
    def _refuse(*_):
        raise AssertionError("the host is asked")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not any(name.startswith(asking) for asking in self.ASKING), f"the host is asked by {name}"
        return func(*args, **(kwargs or {}))
