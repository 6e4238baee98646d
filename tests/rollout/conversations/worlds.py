"""Environments and tools of tests, good and bad. Imported by workers: no torch here."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any

import trimtab


class Echo:
    """Says how much it was told; is done after a number of turns; rewards letters."""

    def __init__(self, turns: int = 3, opening: str = "") -> None:
        self.turns, self.opening, self.heard = turns, opening, []

    def reset(self, **columns: Any) -> str | None:
        return self.opening or None

    def step(self, text: str) -> trimtab.Observation:
        self.heard.append(text)
        done = len(self.heard) >= self.turns
        return trimtab.Observation(f"<{len(text)}>", done, reward=float(text.count("a")), counts={"heard": len(text)})


class Chance(Echo):
    """Depends on random numbers, its own and the module's."""

    def reset(self, seed: int, **columns: Any) -> str | None:
        self.numbers = random.Random(seed)
        return random.choice("abc") if self.numbers.random() < 0.5 else None

    def step(self, text: str) -> trimtab.Observation:
        self.heard.append(text)
        drawn = f"{self.numbers.randrange(10)}{random.randrange(10)}"
        return trimtab.Observation(f"<{drawn}>", len(self.heard) > 3 or random.random() < 0.2, reward=random.random())


class Daemonic(Echo):
    """Starts a browser, say, that leaves its process group and its parent; then does what it is told."""

    def reset(self, mark: str, **columns: Any) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", mark])
            os._exit(0)
        os.wait()

    def step(self, text: str) -> trimtab.Observation:
        if text == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "hang":
            time.sleep(600)
        return super().step(text)


class Lazy(Echo):
    def reset(self, **columns: Any) -> str:
        import numpy

        return str(numpy.random.rand())  # noqa: NPY002 - as users write it


class Moody(Echo):
    """Fails in every way there is, decided by what it is told."""

    def step(self, text: str) -> Any:
        kind = sum(map(ord, text)) % 9
        if kind == 0:
            raise ValueError("I did not like that")
        if kind == 1:
            return None
        if kind == 2:
            return trimtab.Observation("x", reward=float("nan"))
        return super().step(text)


class Slow(Echo):
    """Hangs where it is told to; otherwise counts up, so that a lost state would show."""

    def reset(self, hang: int, **columns: Any) -> None:
        self.hang, self.count = hang, 0

    def step(self, text: str) -> trimtab.Observation:
        self.count += 1
        if self.count == self.hang:
            time.sleep(60)
        return trimtab.Observation(f"{self.count} {os.getpid()}", done=self.count == 4)


class Bound(Slow):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Crash(Echo):
    def step(self, text: str) -> trimtab.Observation:
        os._exit(3)


class Closes(Echo):
    def reset(self, log: str, **columns: Any) -> None:
        self.log = log

    def close(self) -> None:
        with open(self.log, "a") as file:
            file.write("closed\n")


class ClosesSlowly(Closes):
    def close(self) -> None:
        time.sleep(0.05)
        super().close()


class Opens(Closes):
    """Fails when it has opened something already."""

    def reset(self, log: str, **columns: Any) -> None:
        self.log = log
        raise ValueError("full")


class Async(Echo):
    async def step(self, text: str) -> trimtab.Observation:  # type: ignore[override]
        return super().step(text)


class NoStep:
    def reset(self, **columns: Any) -> None: ...

    def stepp(self, text: str) -> str:
        return text


class WrongStep(Echo):
    def step(self, text: str, more: str) -> str:  # type: ignore[override]
        return text


def not_a_class(text: str) -> str:
    return text


def add(a: int, b: int = 1) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def echo(text: str) -> str:
    """
    Says it again.

    Args:
        text: What to say.
    """
    return text


def refuse(text: str) -> str:
    """
    Says no.

    Args:
        text: What not to do.
    """
    raise ValueError(f"not {text}")


def spread(*numbers: int) -> int:
    """
    Adds.

    Args:
        numbers: What to add.
    """
    return sum(numbers)


class Desk:
    def ring(self, times: int) -> str:
        """
        Rings.

        Args:
            times: How often.
        """
        return "ring " * times


unbound = Desk.ring


def undocumented(a: int) -> int:
    return a


def untyped(a):  # type: ignore[no-untyped-def]
    """
    Does something.

    Args:
        a: A thing.
    """
    return a
