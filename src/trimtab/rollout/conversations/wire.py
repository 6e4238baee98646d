"""What the trainer and an environment's worker say to each other. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.base.errors import EnvError
from trimtab.rollout.conversations.observation import Observation, Reply
from trimtab.workers.user_code import Naming, UserCode

CLASS = Naming("environment.fn", "environment", "class", EnvError)
TOOL = Naming("environment.tools", "tool", "function", EnvError)


@dataclass(frozen=True)
class EnvironmentSetup:
    """The first message: what answers the model."""

    path: list[str]
    """Where modules are found."""
    made: UserCode | None
    """The class of an environment; None: there are tools."""
    args: dict[str, Any]
    tools: list[UserCode]
    templated: bool
    """Replies are messages of a chat template; otherwise text."""


@dataclass(frozen=True)
class Loaded:
    """The answer to it."""

    needs: frozenset[str] = frozenset()
    """Columns that `reset` cannot do without."""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the tools, as chat templates take them."""


@dataclass(frozen=True)
class Reset:
    key: int
    """Which conversation."""
    seed: int
    columns: dict[str, Any]


@dataclass(frozen=True)
class Step:
    key: int
    seed: int
    text: str
    state: bytes | None = None
    """A copy of the instance, for a worker that does not have it."""


@dataclass(frozen=True)
class Close:
    key: int


@dataclass(frozen=True)
class ResetResult:
    """The answer to a reset."""

    opening: Reply | None
    state: bytes | None


@dataclass(frozen=True)
class StepResult:
    """The answer to a step."""

    observation: Observation
    state: bytes | None


@dataclass(frozen=True)
class UnknownConversation:
    """The worker does not have this conversation: it is not the process that began it."""
