"""Trained weights from ranks that train to ranks that only generate (`run.placement: {actor: N, rollout: M}`).

    trainer 0 --- broadcast, unit after unit of the weight store ---> sampler 0, 1, 2 ...

The sender and all receivers are one group of torch.distributed beside the trainers' own. Both sides have the same model, so they
know what comes; the version that is sent with it is compared with the one that is expected. Only what is trained is sent: the
rest was read from the same files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trimtab.base.errors import TrainingError
from trimtab.cluster.mesh import LOCALHOST, START_TIMEOUT, Meeting
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy

SENDER = 0


@dataclass(frozen=True)
class Transferred:
    """What a publication came to."""

    seconds: float
    bytes: int


class WeightChannel:
    """One end: the sender is rank 0 of the meeting."""

    def __init__(self, meeting: Meeting, by_unit: bool) -> None:
        """`by_unit`: the sender has whole units. If it has parts (`run.shard: full`), weights are sent one by one as they are put
        together."""
        self._by_unit = by_unit
        store = dist.PrefixStore(meeting.prefix, meeting.open_store())
        self._device = meeting.device
        if meeting.backend == "nccl":
            group: Any = dist.ProcessGroupNCCL(store, meeting.rank, meeting.ranks, dist.ProcessGroupNCCL.Options())
        else:
            group = dist.ProcessGroupGloo(store, meeting.rank, meeting.ranks, START_TIMEOUT)
        self._group = group

    @torch.no_grad()
    def pass_on(self, policy: Policy, version: int) -> Transferred:
        """Send the policy's weights as this version, or receive them into it."""
        begin, moved = time.perf_counter(), 0
        self._expect(version)
        for tensor in _units(policy) if self._by_unit else whole_weights(policy):
            self._broadcast(tensor)
            moved += tensor.nbytes
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Transferred(time.perf_counter() - begin, moved)

    @torch.no_grad()
    def receive(
        self, like: Mapping[str, torch.Tensor], take: Callable[[str, torch.Tensor], None], version: int
    ) -> Transferred:
        """Receive weights one by one, of which the receiver keeps its part: no more than one is whole here. `like`: what comes,
        by name and in order, without values."""
        begin, moved = time.perf_counter(), 0
        self._expect(version)
        for name, tensor in like.items():
            whole = torch.empty_like(tensor, device=self._device)
            self._broadcast(whole)
            take(name, whole)
            moved += whole.nbytes
        return Transferred(time.perf_counter() - begin, moved)

    def _expect(self, version: int) -> None:
        sent = torch.tensor([version], device=self._device)
        self._broadcast(sent)
        if int(sent) != version:
            raise TrainingError(f"weights of version {int(sent)} came where version {version} was expected")

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        self._group.broadcast([tensor], options).wait()


@dataclass(frozen=True)
class ChannelSetup:
    """Where the sender and all receivers of weights meet."""

    store_port: int
    prefix: str
    members: int
    """The sender included."""
    backend: str
    by_unit: bool
    store_host: str = LOCALHOST
    """The driver's machine, as ranks see it."""

    def open(self, place: int, device: torch.device) -> WeightChannel:
        """`place`: 0 for the sender."""
        meeting = Meeting(self.store_port, self.prefix, place, self.members, self.backend, device, self.store_host)
        return WeightChannel(meeting, self.by_unit)


def whole_weights(policy: Policy) -> Iterator[torch.Tensor]:
    """The trained weights one by one, in the model's order. A collective where ranks hold them in parts: all of them take part,
    also those that send nothing."""
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            yield policy.weights.whole(parameter) if isinstance(policy, ShardedPolicy) else parameter.data


def _units(policy: Policy) -> Iterator[torch.Tensor]:
    """The trained weights by unit; padding, which depends on how many ranks cut a unit, is left out. What is in no unit comes by
    itself."""
    store = policy.weights
    for unit in store.units:
        if any(store.parameters[entry.name].requires_grad for entry in unit.entries):
            yield store.flats[unit.name][: max(entry.end for entry in unit.entries)]
    for parameter in policy.model.parameters():
        if parameter.requires_grad and parameter not in store:
            yield parameter.data
