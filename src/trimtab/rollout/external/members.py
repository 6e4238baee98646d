"""The processes of one engine: starts them with the trainer's weights, sends each its work, and replaces one that is lost.

One that dies, hangs or runs out of memory is started again with the current weights. One that fails again and again without a
single sequence ends the run with its own last lines. What a lost one wrote is kept in the run's folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import EngineError
from trimtab.model.adapters import has_adapters
from trimtab.model.memory import free
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.rollout.external.gathered import GatheredWeights
from trimtab.rollout.external.kinds import Kind
from trimtab.rollout.external.messages import Ask, Beat, EngineSetup, Publish, Ready, Settled, Unread
from trimtab.rollout.external.process import SILENCE_TIMEOUT_S, EngineLost, EngineProcess
from trimtab.rollout.external.weights import SharedWeights

START_TIMEOUT_S = 600.0
"""Imports, kernels, graphs."""
MAX_FAILURES_IN_A_ROW = 3
"""Failures in a row, without a sequence in between, that a process may have."""
MAX_KEPT_LOGS = 20
"""Of lost processes that are kept, the newest."""


@dataclass(eq=False)
class Member:
    """One of the processes, and what it is asked for."""

    process: EngineProcess | None = None
    asks: dict[int, Ask] = field(default_factory=dict)
    """What has not come yet."""
    failures: int = 0
    heard: float = 0.0
    """When it last said something."""
    beat: Beat | None = None
    sequences: int = 0
    """How many it runs at a time, at most."""

    @property
    def running(self) -> EngineProcess:
        assert self.process is not None
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


class Members:
    """All processes of an engine. `settings`: the fields of `EngineSetup` but where the model lies and how many sequences each
    process runs."""

    def __init__(
        self,
        kind: Kind,
        policy: Policy,
        tokenizer: Any,
        python: str,
        settings: Mapping[str, Any],
        *,
        processes: int,
        max_sequences: int,
        logs: Path | None,
        on_recovery: Callable[[str], None],
        on_restart: Callable[[str], None],
        devices: Sequence[torch.device] = (),
    ) -> None:
        """`devices`: those that a copy of the model is cut over; by default the policy's own and those behind it."""
        self.kind, self.python = kind, python
        self.max_sequences = max_sequences
        """Sequences that all processes together run at a time, at most."""
        self.version = 0
        self.restarts = 0
        """Times a process was replaced since the last call."""
        self.ready: Ready
        """What the process that was started last says of itself."""
        self.waits = 0
        """Grows while a process is waited for, within the time that it has."""
        self.weights = shared_weights(policy, settings["tensor_parallel"])
        self._device, self._logs = policy.device, logs
        self._devices = devices or devices_behind(policy.device, settings["tensor_parallel"])
        self._on_recovery, self._on_restart = on_recovery, on_restart
        self._members = [Member() for _ in range(processes)]
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-model-")
        self._settings = {**settings, "folder": self._folder.name}
        try:
            _write_config(policy, tokenizer, Path(self._folder.name))
            self._adapters = self.weights.write_adapters(Path(self._folder.name))
            self._published = self.weights.publish()
            self._start(self._members)
        except EngineLost as lost:
            raise self._given_up(lost) from lost
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def each(self) -> int:
        """Sequences that a process is to run at a time, at most."""
        return -(-self.max_sequences // len(self._members))

    def publish(self, version: int) -> None:
        """Have all read the trainer's current weights; where there are adapters, these alone have changed."""
        self.version = version
        self._adapters = self.weights.write_adapters(Path(self._folder.name))
        if self._adapters is None:
            self._published = self.weights.publish()
            self._recover_all(self._publish(self._members))
        else:
            self.tell_all(Publish(version, None, self._adapters))

    def tell_all(self, order: Any, members: Sequence[Member] | None = None) -> list[Member]:
        """An order for all, or for some. Who was lost over it has been started again, without the order, and is returned."""
        lost = self._tell(self._members if members is None else members, order)[1]
        self._recover_all(lost)
        return list(lost)

    def lower(self, max_sequences: int) -> None:
        """Start all again, with fewer sequences at a time."""
        self.max_sequences = max_sequences
        for member in self._members:
            member.stop()
        try:
            self._start(self._members)
        except EngineLost as lost:
            raise self._given_up(lost) from lost

    def recover(self, member: Member, lost: EngineLost) -> None:
        """A new process in place of one that is lost; what ran out of memory gets fewer sequences at a time."""
        self._count(member, lost)
        title, kept = self.kind.title, self._keep(lost)
        if lost.out_of_memory and member.sequences > self.each:  # another has run out at the same time
            self._on_restart(
                f"{title} ran out of memory; restarting it with fewer sequences, like the one before{kept}"
            )
        elif lost.out_of_memory and self.max_sequences > len(self._members):
            self.max_sequences //= 2
            fewer = f"rollout.max_sequences -> {self.max_sequences:,}"
            self._on_recovery(f"{title} ran out of memory; restarting it; {fewer}{kept}")
        else:
            again = f"generating {len(member.asks):,} sequences again"
            self._on_restart(f"{title} stopped ({lost}); restarting it and {again}{kept}")
        self.restarts += 1
        self._restart(member)

    def waited(self) -> None:
        self.waits += 1

    def close(self) -> None:
        for member in self._members:
            member.stop()
        self.weights.close()
        self._folder.cleanup()

    def _start(self, members: Sequence[Member]) -> None:
        """Start processes with the trainer's weights; where kernels are compiled, the first one alone, so that the others find
        them compiled."""
        free(self._device)  # they need room of their own
        variables = visible_devices(self._devices)
        variables |= {} if self._settings["cuda"] else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        ahead = 1 if self._settings["cuda"] and not self._settings["eager"] else 0
        for together in (members[:ahead], members[ahead:]):
            for member in together:
                member.process = EngineProcess(self.kind.name, self.python, variables)
                member.process.waited = self.waited
                member.process.send(EngineSetup(**self._settings, max_sequences=self.each))
                member.sequences = self.each
            for member in together:
                ready = member.running.receive(START_TIMEOUT_S)
                assert isinstance(ready, Ready)
                self.ready = ready
        for lost in self._publish(members).values():
            raise lost

    def _publish(self, members: Sequence[Member]) -> dict[Member, EngineLost]:
        """Weights and adapters, by a way that all can read them; who was lost over it."""
        answers, lost = self._tell(members, Publish(self.version, self._published, self._adapters))
        if not any(isinstance(answer, Unread) for answer in answers):
            return lost
        self.weights.direct = False
        self._published = self.weights.publish()
        return lost | self._publish([member for member in members if member not in lost])

    def _tell(self, members: Sequence[Member], order: Any) -> tuple[list[Settled | Unread], dict[Member, EngineLost]]:
        """An order that all carry out at once: their answers, and who was lost over it."""
        answers: list[Settled | Unread] = []
        lost: dict[Member, EngineLost] = {}
        for member in members:
            try:
                member.running.send(order)
            except EngineLost as error:
                lost[member] = error
        for member in members:
            if member not in lost:
                try:
                    answers.append(_answer(member))
                except EngineLost as error:
                    lost[member] = error
        return answers, lost

    def _restart(self, member: Member) -> None:
        """Until it starts, or has failed too often."""
        while True:
            try:
                member.stop()
                self._start([member])
                return
            except EngineLost as lost:
                self._count(member, lost)
                self._on_restart(f"{self.kind.title} did not start ({lost}); trying again{self._keep(lost)}")

    def _recover_all(self, lost: Mapping[Member, EngineLost]) -> None:
        for member, error in lost.items():
            self.recover(member, error)

    def _count(self, member: Member, lost: EngineLost) -> None:
        member.failures += 1
        if member.failures > MAX_FAILURES_IN_A_ROW:
            raise self._given_up(lost, f", {member.failures} times in a row without finishing a sequence") from lost

    def _given_up(self, lost: EngineLost, often: str = "") -> EngineError:
        kept = self._keep(lost)
        self.close()
        lines = f" Last lines of its log:\n{lost.lines}" if lost.lines else ""
        return EngineError(f"{self.kind.title} failed: {str(lost).rstrip('.')}{often}{kept}.{lines}")

    def _keep(self, lost: EngineLost) -> str:
        """Put what a lost process wrote where it stays, and say where."""
        if self._logs is None or lost.log is None:
            return ""
        try:
            return f"; its log is {keep_log(lost.log, self._logs, self.kind.name)}"
        except OSError as error:  # a run does not end for want of room for it
            return f"; its log could not be saved ({error.strerror})"


def keep_log(log: Path, folder: Path, name: str) -> Path:
    """A copy of a log, `name`-1.log or the next number; of many the oldest goes."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [path.stem.removeprefix(f"{name}-") for path in folder.glob(f"{name}-*.log")]
    numbers = sorted(int(number) for number in found if number.isdecimal())
    for number in numbers[: max(0, len(numbers) + 1 - MAX_KEPT_LOGS)]:
        (folder / f"{name}-{number}.log").unlink()
    target = folder / f"{name}-{max(numbers, default=0) + 1}.log"
    shutil.copyfile(log, target)
    return target


def devices_behind(device: torch.device, count: int) -> list[torch.device]:
    """A device and those behind it, so many in all. A CPU is all of its own."""
    first = device.index or 0
    return [torch.device(device.type, first + place) for place in range(count)] if device.type == "cuda" else [device]


def visible_devices(devices: Sequence[torch.device]) -> dict[str, str]:
    """What makes a library take these devices: libraries begin with the first that they see."""
    places = [device.index or 0 for device in devices]
    if devices[0].type != "cuda" or places == list(range(len(devices))):
        return {}
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = names.split(",") if names else [str(number) for number in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[place] for place in places)}


def shared_weights(policy: Policy, parts: int) -> SharedWeights:
    """The way that a policy's weights take to an engine that is cut into so many parts."""
    if isinstance(policy, ShardedPolicy):
        return GatheredWeights(policy)
    return SharedWeights(policy, one_device=parts == 1)


def _answer(member: Member) -> Settled | Unread:
    while True:
        message = member.running.receive(SILENCE_TIMEOUT_S)
        if isinstance(message, Settled | Unread):
            return message


def _write_config(policy: Policy, tokenizer: Any, folder: Path) -> None:
    """What a library needs to build the model; weights come by another way."""
    # FSDP2 gives modules classes of its own.
    model = policy.skeleton if isinstance(policy, ShardedPolicy) else policy.model
    model = model.get_base_model() if has_adapters(model) else model
    config = model.config
    named = config.architectures
    config.architectures = [type(model).__name__]
    try:
        config.save_pretrained(folder)
    finally:
        config.architectures = named
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
