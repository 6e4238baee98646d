"""What two ranks do for test_overlap.py: each writes what it found into a folder."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cluster.sharded_steps import CASES, CPU, model_of, samples, updater
from trimtab.cluster import mesh as meshes
from trimtab.cluster.mesh import Meeting, Mesh
from trimtab.model.memory import attempt
from trimtab.model.policy import Policy
from trimtab.update.shares import Cost, Share, deal_samples, pack_samples
from trimtab.update.updater import Updater

SHARDS = {"none": 1, "optimizer": 2, "gradients": 2}


def empty() -> Share:
    return Share([], [], [], 30)


def shares(made: Updater, how: str, rank: int) -> Share:
    together = made.objective.together
    if how == "one rank is empty":
        return pack_samples(together, samples(), 30) if rank else empty()
    return deal_samples(together, samples(), 30, 2, Cost(), equal=how == "equal")[rank]


def made(mesh: Mesh, shard: str, overlap: bool, tied: bool = False) -> Updater:
    policy = Policy(model_of(CASES[int(tied)]), shards=SHARDS[shard])
    mesh.shards, mesh.shard = SHARDS[shard], mesh.rank % SHARDS[shard]
    return updater(policy, mesh, overlap=overlap, reduce_early=shard == "gradients")


def weights(one: Updater) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in one.policy.model.named_parameters()}


def step(one: Updater, share: Share) -> float:
    one.accumulate_share(share)
    one.prepare()
    return one.apply(1e-2).grad_norm


def begun(one: Updater, seen: list[str]) -> None:
    """Have the names of units noted when their sums are begun, and the ends of backward passes."""
    begin, backward = one.optimizer.begin_sum, one._backward

    def noted(name: str) -> None:
        seen.append(name)
        begin(name)

    def passed(loss: torch.Tensor) -> None:
        backward(loss)
        seen.append("pass")

    one.optimizer.begin_sum, one._backward = noted, passed  # type: ignore[method-assign]


def run_rank(rank: int, port: int, folder: Path) -> None:
    gc.freeze()  # what the test's process has left to be collected is not this one's to end
    torch.set_num_threads(1)
    meshes.START_TIMEOUT = meshes.STEP_TIMEOUT = timedelta(seconds=60)
    mesh = Mesh(Meeting(port, "overlap", rank, 2, "gloo", CPU), 2)
    found: dict[Any, Any] = {}
    for shard, how in (
        ("none", "dealt"),
        ("optimizer", "dealt"),
        ("optimizer", "one rank is empty"),
        ("gradients", "equal"),
    ):
        for overlap in (False, True):
            one, seen = made(mesh, shard, overlap, tied=how == "dealt"), list[str]()
            begun(one, seen)
            norms = [step(one, shares(one, how, rank)) for _ in range(3)]
            found[shard, how, overlap] = {"norms": norms, "weights": weights(one), "seen": seen}
    found["bytes"] = [_moved(mesh, overlap) for overlap in (False, True)]
    found["waited"] = _waited(mesh, rank)
    for where, fail in FAULTS.items():
        found[where] = _short(mesh, rank, fail)
    torch.save(found, folder / f"rank-{rank}.pt")
    mesh.leave()


def _moved(mesh: Mesh, overlap: bool) -> int:
    one = made(mesh, "optimizer", overlap)
    mesh.take()
    step(one, shares(one, "dealt", mesh.rank))
    return mesh.take()[1]


def _waited(mesh: Mesh, rank: int) -> tuple[float, float]:
    """Seconds that one rank waited, while it was busy as long as the other was late and where it had nothing to do."""
    found = []
    for busy in (True, False):
        one = made(mesh, "optimizer", True)
        dist.barrier()
        if rank:
            _sleep(0.5)
        one.accumulate_share(shares(one, "dealt", rank))
        if busy and not rank:
            _sleep(0.7)
        mesh.take()
        one.prepare()
        one.apply(1e-2)
        found.append(mesh.take()[0])
    return found[0], found[1]


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def _in_first_forward(one: Updater) -> None:
    one._loss = _fail  # type: ignore[method-assign]


def _before_anything(one: Updater) -> None:
    one.optimizer.zero_grad = _fail_once(one.optimizer.zero_grad)  # type: ignore[method-assign]


def _in_last_backward(one: Updater) -> None:
    """After the last layer's sums were begun."""
    layer_done, begun_here = one._overlapped._layer_done, one.optimizer.begin_sum  # type: ignore[union-attr]
    seen: list[str] = []

    def begin(name: str) -> None:
        if len(seen) == 2:
            seen.append("failed")
            raise MemoryError("as a test wants it")
        seen.append(name)
        begun_here(name)

    assert layer_done is not None
    one.optimizer.begin_sum = begin  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Updater], None]] = {
    "forward": _in_first_forward,
    "before anything": _before_anything,
    "last backward": _in_last_backward,
}


def _fail(*_: Any) -> Any:
    raise MemoryError("as a test wants it")


def _fail_once(call: Callable[[], None]) -> Callable[[], None]:
    left = [_fail]

    def failing() -> None:
        if left:
            left.pop()()
        call()

    return failing


def _short(mesh: Mesh, rank: int, fail: Callable[[Updater], None]) -> dict[str, Any]:
    """One rank fails and abandons the step; the other has ended its share. The step is repeated."""
    one = made(mesh, "optimizer", True)
    share = shares(one, "dealt", rank)
    before = {**vars(one)}, {**vars(one.optimizer)}
    if rank:
        fail(one)
    outcome = attempt(one.accumulate_share, share)
    left = len(one._overlapped._left)  # type: ignore[union-attr]
    for what, kept in zip((one, one.optimizer), before):
        for name in set(vars(what)) - set(kept):
            delattr(what, name)
    one.abandon()
    dist.barrier()
    one.abandon()
    norm = step(one, share)
    return {"failed": not hasattr(outcome, "sizes"), "left": left, "norm": norm, "weights": weights(one)}
