"""What tells one kind of run from another while it is built: learning from samples, from worked answers, from pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.data.prompt import Prompt
from trimtab.data.stream import Stream
from trimtab.data.view import View
from trimtab.model.policy import Policy
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.planner import Plan
from trimtab.plan.work import Lengths
from trimtab.record.checkpoint import RunState
from trimtab.reward.models import ModelBackend
from trimtab.rollout.engine import Engine
from trimtab.rollout.seat import ONLY_SEAT, EngineSeat
from trimtab.run.inputs import Inputs
from trimtab.update.batch import Sample
from trimtab.update.objectives.objective import Objective
from trimtab.update.peers import Peers
from trimtab.update.updater import Updater

OnWait = Callable[[str], None]
"""Told what is waited for."""


@dataclass(frozen=True)
class CheckedRun:
    """A run that nothing short of its weights can refuse."""

    config: Any
    device: torch.device
    folder: Path
    tokenizer: Any
    rows: list[dict[str, Any]]
    """What is trained on."""
    lengths: Lengths
    """What a plan has to know of the data."""
    notes: Sequence[str]
    """What was left out of the data, for the user."""
    before_loading: str = ""
    """The notes that are shown before weights are loaded."""


class Stage(Protocol):
    """One kind of run. A `config` is of this kind; a `ready` is what its own `check` gave."""

    reading_note: str
    """The message that is shown while `check` runs."""
    rehearses: bool
    """Two micro-batches can be measured at the start."""

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        """Samples in parts, each of which one micro-batch holds (update/shares.py)."""
        ...

    def check(self, config: Any, inputs: Inputs, stack: ExitStack, *, resume: bool) -> Any:
        """Try everything that needs no weights, cheapest first. Writes nothing. What is opened is closed by `stack`."""
        ...

    def init_state(self, config: Any, state: RunState, changed: Sequence[str] | None) -> None:
        """Set what the run begins with. `changed`: keys that a resumed run has other values for; None: a new run."""
        ...

    def open_engine(
        self,
        ready: Any,
        plan: Plan,
        policy: Policy,
        recoveries: Recoveries,
        logs: Path | None,
        tell: OnWait,
        seat: EngineSeat = ONLY_SEAT,
    ) -> tuple[Plan, Engine]:
        """The engine that a plan names, and the plan, which is another where that engine cannot be had. What lost processes
        wrote is kept in `logs`. `seat`: of a rank."""
        ...

    def load_rewards(self, ready: Any, policy: Policy, tell: OnWait) -> None:
        """Load the models that rewards come from."""
        ...

    def reward_models(self, ready: Any) -> ModelBackend | None:
        """Where rewards come from models: who asks them."""
        ...

    def objective(self, config: Any, policy: Policy) -> Objective:
        """What is minimised; adds to the model what it takes."""
        ...

    def open_critic(self, config: Any, device: torch.device, mesh: DeviceMesh | None, peers: Peers) -> Updater | None:
        """A value model beside the policy, with the plan's sizes. `mesh`: of ranks that hold its weights in parts."""
        ...

    def shorter(self, config: Any) -> str:
        """What to write for shorter sequences."""
        ...

    def stream(self, config: Any, ready: Any, position: int) -> Stream[Any]:
        """The training data in its order, from a position on."""
        ...

    def view(self, ready: Any, stop_token_ids: list[int]) -> View:
        """The first row as the model reads it."""
        ...

    def task_of(self, ready: Any) -> Callable[[Prompt], str] | None:
        """What a prompt's task is called; None where there are no tasks."""
        ...

    def card(self, config: Any, ready: Any, engine: Engine) -> dict[str, Any]:
        """What the start card says of this kind of run."""
        ...
