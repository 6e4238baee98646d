"""Asks torch, in a separate process, which GPUs it can use. A driver that crashes or hangs ends that process, not the doctor.

`python -m trimtab.observe.doctor.probe` prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from trimtab.base.errors import first_line
from trimtab.base.units import GIB
from trimtab.observe.doctor.links import torch_links

TIMEOUT_S = 120.0
MODULE = "trimtab.observe.doctor.probe"


def ask_torch(timeout_s: float = TIMEOUT_S, module: str = MODULE) -> dict[str, Any]:
    """The facts, or {"error": why there are none}."""
    try:
        done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {timeout_s:.0f} s: the driver or a GPU hangs"}
    if done.returncode < 0:
        return {"error": f"the process that imports torch was killed by signal {-done.returncode}"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def torch_facts() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    facts["available"] = torch.cuda.is_available()
    if facts["available"]:
        facts["gpus"] = [_gpu_facts(index) for index in range(torch.cuda.device_count())]
        facts |= torch_links()
    return facts


def _gpu_facts(index: int) -> dict[str, Any]:
    """Facts of one GPU. A small matrix product on it shows whether it can compute."""
    import torch

    seen = torch.cuda.get_device_properties(index)
    facts: dict[str, Any] = {"name": seen.name, "capability": [seen.major, seen.minor], "error": None}
    try:
        ones = torch.ones(256, 256, device=f"cuda:{index}", dtype=torch.bfloat16 if seen.major >= 8 else torch.float32)
        if (ones @ ones).sum().item() != 256.0**3:
            facts["error"] = "a test matrix product gave a wrong result"
        free, size = torch.cuda.mem_get_info(index)
        stats = torch.cuda.memory_stats(index)
    except RuntimeError as error:  # torch's own type for whatever a driver answers
        return facts | {"error": first_line(error)}
    return facts | {
        "free_gib": free / GIB,
        "total_gib": size / GIB,
        "allocated_gib": torch.cuda.memory_allocated(index) / GIB,
        "reserved_gib": torch.cuda.memory_reserved(index) / GIB,
        "alloc_retries": stats.get("num_alloc_retries", 0),
        "ooms": stats.get("num_ooms", 0),
    }


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
