"""What the driver needs of a rank's process, wherever it runs: on this machine (workers/program.py), or on a node of a Ray
cluster (cluster/ray.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trimtab.cluster.tensors import RankProcess
from trimtab.workers.process import package_environment
from trimtab.workers.program import STOP_TIMEOUT_S


class AnyProcess(Protocol):
    """A rank's process, from its start to its end. `send` and `take` raise ProcessLost where it is lost."""

    log: Path
    """All that it writes."""
    place: str
    """Where it runs, if not on this machine; for messages."""

    def fileno(self) -> int:
        """To wait for several of them."""

    def send(self, message: Any, seconds: float) -> None:
        """Send a message; it is lost where nobody reads for so long."""

    def take(self) -> Any:
        """A message that is there, or None."""

    def ask_for_stacks(self) -> None:
        """Have the process write its stacks into its log."""

    def last_lines(self) -> str:
        """What it wrote last."""

    def begin_close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """It hears that nothing more comes, and ends; `close` waits for that."""

    def close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """No process is left, nor anything that it started."""


StartRank = Callable[[int, str, Path, dict[str, str]], AnyProcess]
"""Starts the process of a rank: its number, the module of its program, its log, and variables of its environment."""


def start_here(number: int, module: str, log: Path, variables: dict[str, str]) -> AnyProcess:
    """A process of this machine."""
    return RankProcess(module, [], log, package_environment() | variables)
