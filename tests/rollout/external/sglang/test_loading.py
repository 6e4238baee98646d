"""All weights are written, by the checkpoint's names, and what was not is told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from trimtab.rollout.external.bare import without_adapters
from trimtab.rollout.external.sglang.loading import load_weights


class Wrapped(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Model(nn.Module):
    """As SGLang's: what it does not know it passes over."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(2, 3, bias=False)}) for _ in range(2)])
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_parameter("steps", nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False))
        if wrap:
            for layer in self.layers:
                layer["proj"] = Wrapped(layer["proj"])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        known = dict(self.named_parameters())
        for name, value in weights:
            if name in known:
                known[name].data.copy_(value)


def weights() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    shapes = {"layers.0.proj.weight": (3, 2), "layers.1.proj.weight": (3, 2), "embed.weight": (4, 2)}
    return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_weights_arrive_in_wrapped_layers_too(wrap: bool, check: bool) -> None:
    model, wanted = Model(wrap), weights()
    names = set(model.state_dict())
    load_weights(model, iter(wanted.items()), check)
    assert set(model.state_dict()) == names, "it is wrapped as before"
    with without_adapters(model):
        found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(model.head.weight, wanted["embed.weight"]), "what is tied stays tied"


def test_a_parameter_that_was_not_written_is_named() -> None:
    some = {name: value for name, value in weights().items() if "layers.1" not in name}
    with pytest.raises(RuntimeError, match=r"layers.1.proj.weight: 1 of its parameters"):
        load_weights(Model(wrap=True), iter(some.items()), check=True)


def test_layers_are_wrapped_again_after_a_failure() -> None:
    model = Model(wrap=True)

    def broken() -> Iterable[tuple[str, torch.Tensor]]:
        yield "embed.weight", torch.zeros(4, 2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        load_weights(model, broken(), check=False)
    assert isinstance(model.layers[0]["proj"], Wrapped)
