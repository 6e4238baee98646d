"""How long devices take to tell each other what they have: a latency for each call, and bytes over what a link reaches.

Inside a host devices talk over NVLink or PCIe, between hosts over a network card each. What goes over several hosts is first
reduced inside each, so that only a part of it crosses. Rates are those of the makers times a share that is an estimate: no
machine with several devices was at hand to measure it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.plan.job import Machine
from trimtab.plan.placement import Placement

LINK_SHARE = {"NVLink": 0.7, "PCIe": 0.4}
"""Share of a link's rate that a collective reaches. Over PCIe all devices of a host share its bridges, and cards without peer
access go through host memory. An estimate."""
NETWORK_BYTES_PER_S, NETWORK_SHARE = 50e9, 0.7
"""Bytes a second of the network card that each device has, one way, and the share that is reached."""
GLOO_BYTES_PER_S = 1e9
"""Bytes a second between processes of one CPU: 128 MiB took gloo 0.07 to 0.19 s."""
CALL_S = {"NVLink": 30e-6, "PCIe": 60e-6, "gloo": 1e-3}
"""Seconds that a collective takes before its first byte arrives. An estimate."""
NETWORK_CALL_S = 60e-6
"""The same between hosts, on top."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that take part in a collective: so many on each of so many hosts, and what they talk over."""

    inside: int
    hosts: int
    bytes_per_s: float
    call_s: float

    @property
    def size(self) -> int:
        return self.inside * self.hosts

    def half_s(self, nbytes: float, calls: int) -> float:
        """Seconds of a reduce-scatter, or of an all-gather, of so many bytes in so many calls."""
        if self.size == 1:
            return 0.0
        seconds = calls * self.call_s + (self.inside - 1) / self.inside * nbytes / self.bytes_per_s
        if self.hosts > 1:
            part = nbytes / self.inside
            crossing = (self.hosts - 1) / self.hosts * part / (NETWORK_BYTES_PER_S * NETWORK_SHARE)
            seconds += calls * NETWORK_CALL_S + crossing
        return seconds

    def all_reduce_s(self, nbytes: float, calls: int) -> float:
        """One after the other, both halves; as one call."""
        return 2 * self.half_s(nbytes, calls) - (calls * self.call_s if self.size > 1 else 0.0)


def groups_of(machine: Machine, place: Placement) -> tuple[RankGroup, RankGroup, RankGroup]:
    """All ranks; those that hold one set of parts together; and those that hold the same part."""
    rate, call = link_of(machine)

    def group(inside: int, hosts: int) -> RankGroup:
        return RankGroup(inside, hosts, rate, call)

    everyone = group(place.per_host, place.hosts)
    inside = min(place.state_parts, place.per_host)
    across = place.state_parts // inside
    parts = group(inside, across)
    copies = group(max(1, place.per_host // inside), max(1, place.hosts // across))
    return everyone, parts, copies


def row_group(machine: Machine, ranks: int) -> RankGroup:
    """Consecutive ranks that share micro-batches."""
    rate, call = link_of(machine)
    inside = min(ranks, machine.per_host)
    return RankGroup(inside, -(-ranks // inside), rate, call)


def link_of(machine: Machine) -> tuple[float, float]:
    """Bytes a second that a collective reaches inside a host, and seconds of a call."""
    if machine.cpu:
        return GLOO_BYTES_PER_S, CALL_S["gloo"]
    device = machine.device
    return device.link * LINK_SHARE[device.link_kind], CALL_S[device.link_kind]
