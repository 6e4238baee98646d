"""What a run knows besides tensors: the part of a checkpoint that is JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """Everything a run knows besides tensors. Small, and saved as JSON."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Policy version: optimizer steps applied."""
    data_position: int = 0
    kl_coef: float = 0.0
    skipped_in_a_row: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    reward_first: float | None = None
    reward_last: float | None = None
    accuracy_first: float | None = None
    accuracy_last: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss_first: float | None = None
    eval_loss_last: float | None = None
    seconds: float = 0.0
    """Wall time of all sessions up to this checkpoint."""
    completion_tokens: int = 0
    oom_recoveries: int = 0
    rank_restarts: int = 0
    """Times that ranks were lost and started again."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What running out of memory has taught: `Guard.state`."""
    data_mark: str = ""
    """Which rows it trains on (`data.files.mark_of`)."""
    pass_rates: dict[str, list[list[float]]] = field(default_factory=dict)
    """By row, how its samples did (data/curriculum.py); empty without a curriculum."""
    eval_due: bool = False
    """The evaluation of this step was stopped or failed: the run that resumes makes up for it."""

    def note_reward(self, mean: float) -> None:
        """Remember the first and the latest mean reward of a step that had any."""
        if math.isfinite(mean):
            self.reward_last = mean
            self.reward_first = mean if self.reward_first is None else self.reward_first

    def note_accuracy(self, accuracy: float) -> None:
        """Remember the first and the latest evaluation, and the best after training began."""
        self.accuracy_last = accuracy
        self.accuracy_first = accuracy if self.accuracy_first is None else self.accuracy_first
        if self.step and accuracy > self.best_score:
            self.best_step, self.best_score = self.step, accuracy

    def note_loss(self, loss: float) -> None:
        """Remember the first and the latest loss of a supervised step."""
        self.loss_last = loss
        self.loss_first = loss if self.loss_first is None else self.loss_first

    def note_eval_loss(self, loss: float) -> None:
        """Remember the first and the latest held-out loss, and the best after training began."""
        self.eval_loss_last = loss
        self.eval_loss_first = loss if self.eval_loss_first is None else self.eval_loss_first
        if self.step and -loss > self.best_score:
            self.best_step, self.best_score = self.step, -loss
