"""Weights are read from disk by one rank; the others are handed them.

So a host reads a model once, and its memory holds one whole copy at most while models load, however many ranks there are. The
others first get the model without weights (replica.py:skeleton_of), then its weights, one parameter after the other, straight to
where they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.model.replica import empty_copy, skeleton_of
from trimtab.update.peers import ALONE, Peers


class WeightReader:
    """Makes models that are the same on all ranks. Its calls are collectives."""

    def __init__(self, peers: Peers = ALONE, remote_code: bool = False) -> None:
        """`remote_code`: the model's classes are not part of a package, so that every rank has to make it from its files."""
        self._peers = peers
        self._alone = peers.ranks == 1 or remote_code

    def whole(self, read: Callable[[], Any], device: torch.device) -> Any:
        """The model that `read` gives, on every rank's device."""
        if self._alone:
            return read()
        model = self._made(read, device)
        with torch.no_grad():
            for parameter in model.parameters():
                self._peers.send(parameter.data)
        return model

    def without_values(self, read: Callable[[], Any]) -> Any:
        """The model that `read` gives, in host memory; on other ranks than the first with values that mean nothing until they are
        fetched, and take no memory."""
        return read() if self._alone else self._made(read, torch.device("cpu"))

    @torch.no_grad()
    def fetch(self, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Put parameters of such a model on this rank's device, with their values."""
        for parameter in parameters:
            here = self._alone or self._peers.rank == 0
            value = parameter.data.to(device) if here else torch.empty_like(parameter.data, device=device)
            if not self._alone:
                self._peers.send(value)
            parameter.data = value

    def _made(self, read: Callable[[], Any], device: torch.device) -> Any:
        if self._peers.rank:
            return empty_copy(self._peers.tell(None), device)
        model = read()
        self._peers.tell(skeleton_of(model))
        return model
