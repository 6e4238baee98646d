from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from trimtab.learn.importance import importance_weights

# Trainer over engine, a token: 1.5, 3, 0.5 in sequence 0 and 2, 2 in sequence 1. Products: 2.25 and 4.
ENGINE = torch.log(torch.tensor([0.2, 0.1, 0.8, 0.3, 0.4]))
TRAINER = torch.log(torch.tensor([0.3, 0.3, 0.4, 0.6, 0.8]))
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


def weights(level: str, cap: float, mode: str, trainer: torch.Tensor = TRAINER) -> torch.Tensor:
    return importance_weights(trainer, ENGINE, level, cap, mode, sequence=SEQUENCE, sequences=2)


@pytest.mark.parametrize(
    ("level", "cap", "mode", "expected"),
    [
        ("token", 2.5, "truncate", [1.5, 2.5, 0.5, 2.0, 2.0]),
        ("token", 2.5, "mask", [1.5, 0.0, 0.5, 2.0, 2.0]),
        ("sequence", 3.0, "truncate", [2.25, 2.25, 2.25, 3.0, 3.0]),
        ("sequence", 3.0, "mask", [2.25, 2.25, 2.25, 0.0, 0.0]),
        ("sequence", 10.0, "mask", [2.25, 2.25, 2.25, 4.0, 4.0]),
        ("off", 0.1, "mask", [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_by_hand(level: str, cap: float, mode: str, expected: list[float]):
    assert_close(weights(level, cap, mode), torch.tensor(expected))


def test_a_weight_at_the_cap_is_not_above_it():
    same = torch.zeros(1)
    weight = importance_weights(same, same, "token", 1.0, "mask", sequence=torch.tensor([0]), sequences=1)
    assert weight.tolist() == [1.0]


def test_weights_are_constants_of_the_gradient():
    trainer = TRAINER.clone().requires_grad_()
    for level in ("off", "token", "sequence"):
        assert not weights(level, 2.0, "truncate", trainer).requires_grad


@pytest.mark.parametrize(("mode", "expected"), [("truncate", 2.0), ("mask", 0.0)])
def test_a_product_that_overflows_is_still_above_the_cap(mode: str, expected: float):
    far = ENGINE + 60.0  # products e^180 and e^120: infinite in float32
    result = weights("sequence", 2.0, mode, far)
    assert result.tolist() == [expected] * 5
