"""Devices that can be planned for without one at hand: memory, bandwidth and matrix rate as their makers state them.

Memory is what a process finds on an otherwise idle card: the driver keeps some of what is printed on the box. A name is found by
its letters and digits alone ("RTX 4090", "rtx4090"); a size may be given instead of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.suggestions import alike
from trimtab.base.units import GIB


@dataclass(frozen=True)
class Device:
    """One accelerator. Rates are peaks for half precision without sparsity."""

    name: str
    memory: int
    bandwidth: float
    """Bytes a second."""
    flops: float
    link: float
    """Bytes a second to its neighbours, one way."""
    host_link: float
    """Bytes a second to host memory, one way."""
    lends: bool = True
    """Memory can be given up and taken back at the same addresses."""
    tiled_head: bool = False
    """It runs the kernels that compute log-probs without storing logits."""
    bfloat16: bool = True
    """It has units that compute in bfloat16."""
    link_kind: Literal["NVLink", "PCIe"] = "PCIe"
    """What it talks to its neighbours over; NVLink stands for AMD's links too."""


PCIE_GB_S, SLOWEST_NVLINK_GB_S = 32, 100
"""Gigabytes a second, one way, of a PCIe 4.0 slot, and the least of the links that are more than a slot."""


def _gpu(
    name: str,
    gib: float,
    tb_s: float,
    tflops: float,
    link_gb_s: float = PCIE_GB_S,
    host_gb_s: float = 25,
    hopper: bool = False,
    bfloat16: bool = True,
) -> Device:
    rates = tb_s * 1e12, tflops * 1e12, link_gb_s * 1e9, host_gb_s * 1e9
    kind: Literal["NVLink", "PCIe"] = "NVLink" if link_gb_s >= SLOWEST_NVLINK_GB_S else "PCIe"
    return Device(name, int(gib * GIB), *rates, tiled_head=hopper, bfloat16=bfloat16, link_kind=kind)


CATALOGUE: dict[str, Device] = {
    "t4": _gpu("T4", 14.6, 0.32, 65, 16, 12, bfloat16=False),
    "v100": _gpu("V100 32 GB", 31.7, 0.9, 125, 150, 12, bfloat16=False),
    "a10": _gpu("A10", 22.0, 0.6, 125),
    "l4": _gpu("L4", 22.0, 0.3, 121),
    "l40s": _gpu("L40S", 44.4, 0.864, 362),
    "rtx3090": _gpu("RTX 3090", 23.6, 0.936, 71),
    "rtx4090": _gpu("RTX 4090", 23.5, 1.008, 165),
    "rtx5090": _gpu("RTX 5090", 31.4, 1.792, 210, 64, 50),
    "a100-40": _gpu("A100 40 GB", 39.4, 1.555, 312, 300),
    "a100-80": _gpu("A100 80 GB", 79.2, 2.039, 312, 300),
    "h20": _gpu("H20", 95.0, 4.0, 148, 450, 50, hopper=True),
    "h100": _gpu("H100 80 GB", 79.1, 3.35, 989, 450, 50, hopper=True),
    "h200": _gpu("H200", 139.8, 4.8, 989, 450, 50, hopper=True),
    "b200": _gpu("B200", 178.3, 8.0, 2250, 900, 50, hopper=True),
    "mi300x": _gpu("MI300X", 191.5, 5.3, 1307, 448, 50),
}
SHORT = {
    "a100": "a100-80",
    "4090": "rtx4090",
    "3090": "rtx3090",
    "5090": "rtx5090",
    "a10040": "a100-40",
    "a10080": "a100-80",
}


def find_device(name: str, memory: int | None = None) -> Device:
    """The catalogue's device of that name, with another amount of memory where one is given."""
    letters = re.sub(r"nvidia|geforce|amd|instinct|gb$|gib$|[^a-z0-9]", "", name.lower())
    known = {key.replace("-", ""): key for key in CATALOGUE} | SHORT
    if letters not in known:  # torch's own names say more: a100sxm480
        more = r"(sxm\d?|pcie|nvl)?(24|32|40|48|80|94|141|180|192)?"
        begins = max((key for key in known if re.fullmatch(key + more, letters)), key=len, default="")
        letters = "a10040" if begins == "a100" and letters.endswith("40") else begins or letters
    if letters not in known:
        near = alike(letters, known, most=1, cutoff=0.6)
        fix = f"Did you mean {known[near[0]]}? " if near else ""
        what = f"{name!r} is not a known device"
        raise ConfigError(
            [Problem("--device", what, f"{fix}Write one of {', '.join(CATALOGUE)}, or only --device-memory.")]
        )
    device = CATALOGUE[known[letters]]
    return device if memory is None else replace(device, memory=memory)


def of_size(memory: int) -> Device:
    """A device of which only the memory is known: rates are those of the smallest in the catalogue that has as much."""
    larger = sorted((d for d in CATALOGUE.values() if d.memory >= 0.9 * memory), key=lambda d: (d.memory, d.flops))
    like = larger[0] if larger else CATALOGUE["b200"]
    return replace(like, name=f"{memory / GIB:.0f} GiB device (rates of {like.name})", memory=memory)


def nearest(name: str, memory: int, total: int | None = None) -> Device:
    """The catalogue's entry for a device that torch names, or one like it by size. `memory`: what a plan may count on; `total`:
    what the device has, where that is more."""
    total = total or memory
    words = re.sub(r"[^a-z0-9]+", "-", name.lower())
    matches = [key for key in CATALOGUE if re.search(_spelled(key), words)]
    if not matches:
        return replace(of_size(total), name=name, memory=memory)
    best = CATALOGUE[min(matches, key=lambda key: abs(CATALOGUE[key].memory - total))]
    if "pcie" in words.split("-") and best.link_kind == "NVLink":  # the same chip on a card in a slot
        best = replace(best, link=best.host_link, link_kind="PCIe")
    return replace(best, name=name, memory=memory)


def _spelled(key: str) -> str:
    """How torch's names spell a device of the catalogue: `RTX 4090`, `A10G`, `GH200`, but not an `A100` for an `A10`."""
    model = re.sub(r"([a-z])(\d)", r"\1-?\2", key.split("-")[0])
    return rf"(^|-)g?{model}[a-z]*(-|$)"
