"""Built-in tasks: problems generated on the spot, with a difficulty dial, that need no download.

- The same (task, difficulty, options, seed, split) gives the same rows, on every machine.
- Rows are distinct, and train and eval never share one, whatever their seeds and sizes: a problem belongs to eval
  when a hash of its prompt text says so (one in eight does), else to train.
- When a split holds fewer problems than were asked for, all of them are given and the shortage is logged.

A task is a pure function from an index to a problem, so its whole problem space can be counted, enumerated or
sampled.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.data.files import Row
from trimtab.data.options import Split, check_options, split_size, whole_number

TRAIN_SIZE, EVAL_SIZE = 4096, 256
"""Rows generated when `size` and `eval_size` are not set."""
MAX_DIFFICULTY = 1000
"""The greatest difficulty: digits of a number, letters of a word."""

_EVAL_ONE_IN = 8
_ENUMERABLE = 100_000

log = logging.getLogger(__name__)


def exact_score(completion: str, row: Mapping[str, Any]) -> float:
    """1 when the completion's first line, without surrounding white space, is the answer; else 0."""
    lines = completion.strip().splitlines()
    return float(bool(lines) and lines[0].strip() == row["answer"])


@dataclass(frozen=True)
class Task:
    """A space of problems with known answers."""

    name: str
    description: str
    count: Callable[..., int]
    """(difficulty, **options) -> how many problems there are."""
    problem: Callable[..., tuple[str, str]]
    """(index, difficulty, **options) -> (prompt, answer); a different prompt for every index below count."""
    difficulty: int
    """Difficulty when none is asked for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own options and their defaults."""
    score: Callable[[str, Mapping[str, Any]], float] = exact_score
    """(completion text, row) -> 0..1."""

    def generate(
        self, size: int, difficulty: int | None = None, seed: int = 0, split: Split = "train", **options: Any
    ) -> list[Row]:
        """Up to `size` distinct problems of one split."""
        level, settings = difficulty or self.difficulty, {**self.options, **options}
        rows: list[Row] = []
        for index in _indices(self.count(level, **settings), size, Random(f"{self.name} {split} {seed}")):
            prompt, answer = self.problem(index, level, **settings)
            if split_of(prompt) == split:
                rows.append({"prompt": prompt, "answer": answer, "task": self.name})
                if len(rows) == size:
                    return rows
        if not rows:
            raise DataError(
                f"task:{self.name} has no {split} problems at difficulty {level}. Raise data.options.difficulty."
            )
        log.warning(
            "task:%s has only %d %s problems at difficulty %d; %d were asked for.",
            self.name,
            len(rows),
            split,
            level,
            size,
        )
        return rows


def split_of(prompt: str) -> Split:
    """The split that a problem belongs to, for every seed and size."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % _EVAL_ONE_IN == 0 else "train"


def load_task(name: str, *, split: Split, limit: int | None, options: Mapping[str, Any], seed: int) -> list[Row]:
    """Rows of `task:NAME`. Options: difficulty, size (training rows), eval_size, seed, and the task's own."""
    if name not in TASKS:
        raise DataError(f"There is no task {name!r}.{did_you_mean(name, TASKS)} Tasks: {', '.join(TASKS)}.")
    task = TASKS[name]
    check_options(f"task:{name}", options, ["difficulty", "size", "eval_size", "seed", *task.options])
    size = split_size(f"task:{name}", split, options, TRAIN_SIZE, EVAL_SIZE)
    asked = options.get("difficulty", task.difficulty)
    difficulty = whole_number(f"task:{name}", "difficulty", asked, at_least=1, at_most=MAX_DIFFICULTY)
    own = {key: options.get(key, default) for key, default in task.options.items()}
    for key, value in own.items():
        if type(value) is not type(task.options[key]):
            raise DataError(f"task:{name}: option {key} must be like {task.options[key]!r}, not {value!r}.")
    wanted = size if limit is None else min(size, limit)
    seed = whole_number(f"task:{name}", "seed", options.get("seed", seed), at_least=0)
    return task.generate(wanted, difficulty, seed, split, **own)


def _indices(count: int, size: int, random: Random) -> Iterator[int]:
    """Distinct indices below `count` in random order: all of them if they are few, else without end.

    A space that is not enumerated has at least twice `size` problems in its smaller split, so `size` are soon found.
    """
    if count <= max(_ENUMERABLE, 2 * _EVAL_ONE_IN * size):
        order = list(range(count))
        random.shuffle(order)
        yield from order
        return
    seen: set[int] = set()
    while True:
        index = random.randrange(count)
        if index not in seen:
            seen.add(index)
            yield index


# --- the tasks: for each, how many problems there are and the index-th of them


def _operands(difficulty: int) -> tuple[int, int]:
    """The smallest number with this many digits, and how many there are; one digit includes 0."""
    low = 10 ** (difficulty - 1) if difficulty > 1 else 0
    return low, 10**difficulty - low


def _arithmetic_count(difficulty: int, ops: str) -> int:
    if not ops or set(ops) - set("+-*") or len(set(ops)) != len(ops):
        raise DataError(f"task:arithmetic: option ops must be some of '+-*', not {ops!r}.")
    return len(ops) * _operands(difficulty)[1] ** 2


def _arithmetic(index: int, difficulty: int, ops: str) -> tuple[str, str]:
    low, count = _operands(difficulty)
    index, which = divmod(index, len(ops))
    a, b = (low + digit for digit in divmod(index, count))
    result = {"+": a + b, "-": a - b, "*": a * b}[ops[which]]
    return f"{a}{ops[which]}{b}=", str(result)


def _words_count(difficulty: int, letters: str) -> int:
    if len(letters) < 2 or len(set(letters)) != len(letters) or any(c.isspace() for c in letters):
        raise DataError(f"Option letters must be two or more different characters without spaces, not {letters!r}.")
    return len(letters) ** difficulty


def _word(index: int, difficulty: int, letters: str) -> str:
    """The index-th string of this length: the index written in base len(letters)."""
    word = ""
    for _ in range(difficulty):
        index, which = divmod(index, len(letters))
        word += letters[which]
    return word


def _sort(index: int, difficulty: int, letters: str) -> tuple[str, str]:
    word = _word(index, difficulty, letters)
    return f"sort {word}=", "".join(sorted(word))


def _reverse(index: int, difficulty: int, letters: str) -> tuple[str, str]:
    word = _word(index, difficulty, letters)
    return f"reverse {word}=", word[::-1]


def _count_count(difficulty: int, letters: str) -> int:
    return len(letters) * _words_count(difficulty, letters)


def _count(index: int, difficulty: int, letters: str) -> tuple[str, str]:
    index, which = divmod(index, len(letters))
    word = _word(index, difficulty, letters)
    return f"count {letters[which]} in {word}=", str(word.count(letters[which]))


_ALL = [
    Task(
        "arithmetic",
        "Sums of two numbers with as many digits as the difficulty: 37+45= -> 82. ops: '+', '+-', '+-*'.",
        _arithmetic_count,
        _arithmetic,
        difficulty=2,
        options={"ops": "+"},
    ),
    Task(
        "sort",
        "Put as many characters as the difficulty in order: sort 3142= -> 1234. letters: the characters used.",
        _words_count,
        _sort,
        difficulty=4,
        options={"letters": "0123456789"},
    ),
    Task(
        "reverse",
        "Write as many characters as the difficulty backwards: reverse abcd= -> dcba. letters: the characters used.",
        _words_count,
        _reverse,
        difficulty=4,
        options={"letters": "abcdefghijklmnopqrstuvwxyz"},
    ),
    Task(
        "count",
        "How often a letter occurs in a word as long as the difficulty: count a in abcaab= -> 3. letters: those used.",
        _count_count,
        _count,
        difficulty=6,
        options={"letters": "abc"},
    ),
]

TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""Task name -> task."""
