"""What `--profile-steps` and `--profile-ranks`, or in Python `profile_steps` and `profile_ranks`, ask for.

Imports no torch, so that a mistake is told at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from trimtab.base.errors import ConfigError, Problem

MAX_STEPS = 20
"""A trace of more steps is larger than what any viewer opens."""


@dataclass(frozen=True)
class Spelling:
    """What the user calls the two settings, for messages."""

    steps: str
    ranks: str
    example: str


OPTIONS = Spelling("--profile-steps", "--profile-ranks", "--profile-steps 3:5")
KEYWORDS = Spelling("profile_steps", "profile_ranks", 'profile_steps="3:5"')


@dataclass(frozen=True)
class ProfileRequest:
    """Steps `first` to `last`, both included, on some ranks."""

    first: int
    last: int
    ranks: tuple[int, ...] = (0,)
    spelling: Spelling = OPTIONS

    def check_steps(self, steps: int) -> None:
        """Refuse steps beyond the run's last."""
        if self.last > steps:
            what = f"step {self.last} is beyond the last step of this run, {steps}"
            raise ConfigError([Problem(self.spelling.steps, what, f"Choose steps from 1 to {steps}.")])

    def after(self, done: int) -> ProfileRequest | None:
        """What is left of it in a run that resumes after step `done`; None: nothing."""
        return replace(self, first=max(self.first, done + 1)) if done < self.last else None

    def check_ranks(self, ranks: int) -> None:
        """Refuse ranks that the run does not have."""
        for rank in self.ranks:
            if rank >= ranks:
                have = "one device, which is rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
                raise ConfigError([Problem(self.spelling.ranks, f"there is no rank {rank}: this run has {have}")])


def profile_request(steps: object, ranks: object) -> ProfileRequest | None:
    """The same from Python, where a number may stand for its text."""
    for name, value in ((KEYWORDS.steps, steps), (KEYWORDS.ranks, ranks)):
        if not (value is None or isinstance(value, str) or type(value) is int):
            fix = 'Write "3:5", or one step.' if name == KEYWORDS.steps else 'Write 0, or "0,1".'
            raise ConfigError([Problem(name, f"got a {type(value).__name__}", fix)])
    return parse_request(None if steps is None else str(steps), None if ranks is None else str(ranks), KEYWORDS)


def parse_request(steps: str | None, ranks: str | None, spelling: Spelling = OPTIONS) -> ProfileRequest | None:
    """`3:5` or `4`, and `0` or `0,2`; None where nothing is to be profiled."""
    key = spelling.steps
    if steps is None:
        if ranks is not None:
            raise ConfigError([Problem(spelling.ranks, f"has no effect without {key}", f"Add {spelling.example}.")])
        return None
    found = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", steps.strip())
    if not found:
        raise ConfigError(
            [Problem(key, f"{steps!r} is no range of steps", "Write first:last, such as 3:5, or one step.")]
        )
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if first < 1:
        raise ConfigError(
            [Problem(key, f"{steps!r} begins before the first step, which is 1", "Write 1:3, for example.")]
        )
    if last < first:
        raise ConfigError([Problem(key, f"{steps!r} ends before it begins", f"Write {last}:{first}.")])
    if last - first >= MAX_STEPS:
        what = f"{steps!r} has {last - first + 1:,} steps; a profile has {MAX_STEPS} at most"
        raise ConfigError([Problem(key, what, f"Write {first}:{first + 2}, for example.")])
    return ProfileRequest(first, last, _ranks(ranks, spelling.ranks), spelling)


def _ranks(text: str | None, key: str) -> tuple[int, ...]:
    if text is None:
        return (0,)
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
        raise ConfigError([Problem(key, f"{text!r} is no list of ranks", "Write 0, or 0,1.")])
    return tuple(dict.fromkeys(map(int, parts)))
