"""What several GPUs of a machine talk to each other over: what the driver and torch say of it, and what slows training down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab.observe.doctor.finding import Finding

MAX_NVLINKS = 18
"""The most that a GPU has today: the driver is asked for each by number."""
PATHS = {
    0: "on one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through the processor's PCIe bridge",
    40: "between PCIe bridges of one processor",
    50: "between processors",
}
"""NVML's levels of topology: what two GPUs have in common."""


def driver_links(pynvml: Any) -> dict[str, Any]:
    """Active NVLinks of each GPU, and the longest PCIe path between two of them. Nothing for what the driver does not tell."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if len(handles) < 2:
        return {}
    return {
        "nvlinks": [_active_nvlinks(pynvml, handle) for handle in handles],
        "path": _longest_path(pynvml, handles),
    }


def torch_links() -> dict[str, Any]:
    """NCCL's version, and the pairs of GPUs that cannot read each other's memory."""
    import torch

    count = torch.cuda.device_count()
    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    pairs = [
        [one, other]
        for one, other in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    return {"nccl": None if version is None else ".".join(map(str, version)), "no_peer_access": pairs}


def links_in_words(torch: Mapping[str, Any], links: Mapping[str, Any]) -> str:
    """`NVLink (18 links each), NCCL 2.27.3`"""
    counts = sorted(set(links.get("nvlinks", [])))
    if any(counts):
        told = f"NVLink ({' or '.join(map(str, counts))} links each)"
    else:
        told = f"PCIe, {links['path']}" if links.get("path") else "not known"
    return f"{told}, NCCL {torch.get('nccl') or 'missing'}"


def link_findings(gpus: Sequence[Mapping[str, Any]], torch: Mapping[str, Any]) -> Iterator[Finding]:
    if len(gpus) < 2:
        return
    names = sorted({gpu["name"] for gpu in gpus})
    if len(names) > 1:
        yield _found(
            "gpus_differ",
            "the GPUs are not of one kind",
            "kinds",
            "one kind",
            ", ".join(names),
            "every step waits for the slowest GPU, and the plan for the one with the least memory",
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES",
        )
    if pairs := torch.get("no_peer_access"):
        shown = ", ".join(f"{one} and {other}" for one, other in pairs[:4])
        yield _found(
            "no_peer_access",
            "GPUs cannot read each other's memory",
            "pairs",
            "every pair has peer access",
            f"{len(pairs)} pair{'s' * (len(pairs) > 1)} without it: GPU {shown}{' ...' * (len(pairs) > 4)}",
            "the cards or the virtual machine forbid it, or PCIe access control (ACS) is on: data goes through host memory",
            "switch ACS off in the firmware if the machine is yours; nvidia-smi topo -p2p r shows what is allowed",
        )
    if "nccl" in torch and torch["nccl"] is None:
        yield _found(
            "no_nccl",
            "torch was built without NCCL",
            "build",
            "a build with NCCL",
            f"torch {torch.get('version')}",
            "several GPUs talk to each other through NCCL; without it a run uses one",
            "install torch for CUDA on Linux from pytorch.org",
        )


def _found(rule: str, title: str, unit: str, healthy: str, evidence: str, cause: str, remedy: str) -> Finding:
    return Finding(rule, "warn", title, unit, healthy, evidence, cause, remedy, "safe")


def _active_nvlinks(pynvml: Any, handle: Any) -> int:
    active = 0
    for link in range(MAX_NVLINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:  # no such link
            break
    return active


def _longest_path(pynvml: Any, handles: Sequence[Any]) -> str | None:
    try:
        levels = [
            pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other) for one, other in itertools.combinations(handles, 2)
        ]
    except pynvml.NVMLError:
        return None
    return PATHS.get(max(levels))
