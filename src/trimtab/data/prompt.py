"""A prompt: what the model reads, and the columns its rewards will need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, ready for an engine."""

    id: int
    """Row number in its data set; with the seed and the step it keys sampling."""
    prompt: str | list[Message]
    """As the row had it (with the configured system message and suffix); rewards receive this."""
    tokens: list[int]
    """What the model reads."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, passed to rewards by name."""

    @property
    def conversational(self) -> bool:
        """Rewards of a conversational prompt receive completions as messages, as the field's convention has it."""
        return not isinstance(self.prompt, str)
