"""Weights reach an engine's process: where they lie on a device, or through host memory where they cannot be seen there."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.rollout.contract.engines import small_policy
from tests.rollout.contract.test_failures import scripted
from trimtab.model.policy import Policy
from trimtab.rollout.external import ipc, members, weights
from trimtab.rollout.external.messages import Publish, Settled, Unread
from trimtab.rollout.external.reading import Reader
from trimtab.rollout.external.weights import SharedWeights

ROOT = Path(__file__).parents[3]


def test_weights_go_through_memory_that_has_no_name() -> None:
    policy = small_policy()
    shared, reader = SharedWeights(policy), Reader()
    shared.direct = False
    published = shared.publish()
    reader.take(published)
    found, state = dict(reader.read()), policy.model.state_dict()
    assert set(found) == set(state) >= {"lm_head.weight"}
    assert shared.host_bytes < sum(value.nbytes for value in found.values()), "what is tied is there once"
    assert all(torch.equal(found[name], value.cpu()) for name, value in state.items())
    assert torch.equal(found["lm_head.weight"], state["model.embed_tokens.weight"].cpu())
    memory = Path(published.file or "")
    assert "memfd" in os.readlink(memory)
    shared.close()
    assert not memory.exists()


def test_weights_are_told_by_unit_and_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """One handle a unit, and each tensor's bytes within it."""
    policy = small_policy()
    flats = {flat.data_ptr(): name for name, flat in policy.weights.flats.items()}
    monkeypatch.setattr(weights, "export", lambda pointer: (flats[pointer].encode(), 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    shared = SharedWeights(policy)
    shared.direct = True
    published = shared.publish()
    found = {entry.name: entry for entry in published.layout}
    assert set(found) == set(policy.model.state_dict())
    for name, value in policy.model.state_dict().items():
        entry, flat = found[name], policy.weights.flats[published.handles[found[name].handle].decode()]
        part = flat.view(torch.uint8)[entry.offset : entry.offset + value.nbytes]
        assert torch.equal(part.view(value.dtype).view(value.shape), value), name


def test_weights_that_an_engine_cannot_see_go_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from then on always."""
    policy = small_policy()
    monkeypatch.setattr(weights, "export", lambda pointer: (b"a handle", pointer))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    class Direct(SharedWeights):
        def __init__(self, policy: Policy, one_device: bool = True) -> None:
            super().__init__(policy, one_device)
            self.direct = True

    monkeypatch.setattr(members, "SharedWeights", Direct)
    engine, made = scripted(monkeypatch, [Unread("not in this container"), Settled(), Settled()], first=[])
    engine.publish(1)
    ways = [order.weights.file is None for order in made[0].sent if isinstance(order, Publish) and order.weights]
    assert ways == [True, False, False] and "through host memory" in engine.description
    assert engine.policy is not policy
    engine.close()


@pytest.mark.parametrize("refused", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"])
def test_memory_that_cannot_be_exported_goes_through_host_memory(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As expandable segments cannot."""

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *arguments: 1 if name == refused else 0

    monkeypatch.setattr(ipc, "_driver", Driver)
    monkeypatch.setattr(ipc, "_have_context", lambda: None)
    shared = SharedWeights(small_policy())
    shared.direct = True
    assert shared.publish().file is not None and not shared.direct
    shared.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_sees_the_weights_where_they_lie() -> None:
    policy = small_policy()
    shared = SharedWeights(policy)
    child = subprocess.Popen(
        [sys.executable, "-c", SUMS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "src"
    )
    assert child.stdin is not None and child.stdout is not None
    for change in (0.0, 1.0):
        with torch.no_grad():
            for value in policy.model.parameters():
                value += change
        published = shared.publish()
        assert published.file is None and shared.host_bytes == 0
        child.stdin.write(pickle.dumps(published).hex() + "\n")
        child.stdin.flush()
        seen = json.loads(child.stdout.readline())
        state = policy.model.state_dict()
        assert seen == {name: float(value.double().sum()) for name, value in state.items()}
    child.stdin.close()
    assert child.wait(60.0) == 0


SUMS = """
import json, pickle, sys
from trimtab.rollout.external.reading import Reader
reader = Reader()
for line in sys.stdin:
    reader.take(pickle.loads(bytes.fromhex(line.strip())))
    print(json.dumps({name: float(value.double().sum()) for name, value in reader.read()}), flush=True)
"""
