"""What a node of a Ray cluster says of itself. `look` travels to the node whole (ray_nodes.py), so that it also runs where
Trimtab is not installed, or another version of it: it uses the standard library alone, and imports inside."""

from __future__ import annotations

from typing import Any


def look() -> dict[str, Any]:
    """Versions, cores, free memory, clock and GPUs of this node."""
    import hashlib
    import importlib.util
    import os
    import platform
    import subprocess
    import time
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    def source(package: str) -> str:
        """Of the package's files: the same version may be checked out at another commit."""
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return "none"
        root, found = Path(spec.origin).parent, hashlib.sha256()
        for path in sorted(root.rglob("*.py")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
        return found.hexdigest()[:12]

    def gpus() -> list[list[str]]:
        ask = [
            "nvidia-smi",
            "--query-gpu=index,name,memory.total,memory.free,compute_cap",
            "--format=csv,noheader,nounits",
        ]
        try:
            told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return []
        return [[part.strip() for part in line.split(",")] for line in told.splitlines() if line.strip()]

    def free_memory() -> int:
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def networks() -> list[str]:
        """Adapters for InfiniBand and RoCE, with what each has on its wire."""
        found = []
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
            try:
                state, layer = (port / "state").read_text(), (port / "link_layer").read_text().strip()
                if "ACTIVE" in state:
                    found.append(f"{port.parts[-3]} {'RoCE' if layer == 'Ethernet' else layer}")
            except OSError:
                continue
        return found

    versions = {name: installed(name) for name in ("ray", "torch", "transformers")}
    versions |= {"Python": platform.python_version(), "Trimtab's source": source("trimtab")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))}
    found = {"versions": versions, "cores": cores, "memory": free_memory(), "gpus": gpus(), "networks": networks()}
    return found | {"variables": variables, "clock": time.time()}
