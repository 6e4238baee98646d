"""What a user sees when something they wrote, or something outside their control, is wrong.

Every message says what was wrong, where, and what to write instead. Broken invariants of Trimtab's own are asserts, not these.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass


class TrimtabError(Exception):
    """Base of every error that is meant to be read by a user; the command line prints it without a traceback."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the dotted key, what is wrong with it, and what to write instead."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}. {self.fix}" if self.fix else line


class ConfigError(TrimtabError):
    """The configuration cannot be run. Holds every problem found, not only the first, but for `unlisted` more after many."""

    def __init__(self, problems: list[Problem] | str, unlisted: int = 0) -> None:
        self.problems = [Problem("", problems)] if isinstance(problems, str) else problems
        count = len(self.problems) + unlisted
        head = f"{count:,} problems in the configuration:\n  " if count > 1 else ""
        tail = f"\n  and {unlisted:,} more" if unlisted else ""
        super().__init__(head + "\n  ".join(str(p) for p in self.problems) + tail)


class DataError(TrimtabError):
    """A data set cannot be read or does not hold what the configuration says."""


class RewardError(TrimtabError):
    """A reward cannot be loaded, or fails so often that training on the rest would be misleading."""


class EnvError(TrimtabError):
    """An environment or a tool cannot be loaded, or does not fit the data or the model."""


class ModelError(TrimtabError):
    """A model cannot be loaded, or its architecture cannot be trained exactly."""


class EngineError(TrimtabError):
    """A rollout engine cannot serve the request it was given."""


class TrainingError(TrimtabError):
    """The run cannot go on: repeated non-finite steps, no training signal, a checkpoint of another run."""


class DivergedError(TrainingError):
    """The weights, or what they compute, are no longer finite. No checkpoint is written of them."""


class MemoryExhausted(TrainingError):
    """Memory ran out with every `run` setting at its minimum."""


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_no_space(error: BaseException) -> bool:
    """The disk is full, or the user's share of it or the size that a file may have. safetensors says so in words alone."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    codes = (f"os error {code}" for code in NO_SPACE)
    return type(error).__name__ == "SafetensorError" and any(code in str(error) for code in codes)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


MAX_MESSAGE_CHARACTERS = 4_000
"""Characters of a message that others wrote: user code may raise an error with a whole file in it."""


def cut(text: str, longest: int = MAX_MESSAGE_CHARACTERS) -> str:
    """The text without its middle where it is too long: a traceback says what was wrong at its end, an error at its beginning."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters left out] … {text[-half:]}"
