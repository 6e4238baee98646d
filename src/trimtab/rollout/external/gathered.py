"""Weights that ranks hold in parts (`run.shard: full`) on their way to the engines of a host: one copy in host memory for all.

A publish is a collective. The weights are gathered a layer at a time; the first rank of each host writes them into its file, and
all engines of the host read that one. The file is whole until the next publish, so an engine that is started again in the middle
of a rollout reads it without the other ranks.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import torch.distributed as dist

from trimtab.model.sharded import ShardedPolicy
from trimtab.rollout.external.messages import Weights
from trimtab.rollout.external.weights import Layout, SharedWeights, WeightsFile, checkpoint_names, named_weights

Thing = TypeVar("Thing")


class GatheredWeights(SharedWeights):
    """See weights.py. Making it is a collective, too."""

    def __init__(self, policy: ShardedPolicy) -> None:
        super().__init__(policy, one_device=False)
        self._layout = Layout(checkpoint_names(policy.skeleton))
        hosts = from_all_ranks(socket.gethostname())
        writer = hosts.index(socket.gethostname())
        if dist.get_rank() == writer:
            self._file = WeightsFile(self._layout)
        self._path = from_all_ranks(None if self._file is None else self._file.path)[writer]

    def publish(self) -> Weights:
        """Gather the current ones. When it returns, all of them are written."""
        weights = named_weights(self._policy)
        if self._file is None:
            for _ in weights:
                pass
        else:
            self._file.write(weights)
        dist.barrier()
        return Weights(self._layout.entries, self._path)


def from_all_ranks(thing: Thing) -> list[Thing]:
    """What each rank has, by rank."""
    found: list[Thing] = [thing] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found
