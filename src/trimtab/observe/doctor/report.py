"""The report that `trimtab doctor` prints: facts, findings with evidence, healthy rules and rules not judged. Fits any width."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.observe.console import PLAIN_WIDTH
from trimtab.observe.doctor.examine import MIN_STEPS_TO_JUDGE, Examination
from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.links import links_in_words
from trimtab.observe.doctor.machine import MachineReport
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule
from trimtab.observe.format import duration, gib, number, percent

STYLE = {"ok": "green", "warn": "yellow", "bad": "red"}
LEARNS = {"sft": "from worked answers (sft)", "reward-model": "which of two answers is better (reward-model)"}
MARK = {"ok": "ok", "warn": "warning", "bad": "BAD"}


def print_report(file: IO[str], parts: Sequence[RenderableType], width: int | None = None) -> None:
    """Without `width`, lines are as wide as the terminal, or PLAIN_WIDTH."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")  # a terminal that cannot show '·' must not end in a traceback
    plain = None if file.isatty() else PLAIN_WIDTH
    colours = None if isinstance(file, io.StringIO) else "auto"  # a notebook's kernel asks for them everywhere
    console = Console(
        file=file,
        width=width or plain,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
        color_system=colours,  # type: ignore[arg-type]
    )
    for part in parts:
        console.print(part)


def machine_report(machine: MachineReport, findings: Sequence[Finding]) -> list[RenderableType]:
    return [_facts(_machine_facts(machine)), *map(_finding, findings), Text(), _verdict(findings, [])]


def facts_report(facts: list[tuple[str, str]], findings: Sequence[Finding]) -> list[RenderableType]:
    return [_facts(facts), *map(_finding, findings), Text(), _verdict(findings, [])]


def verdict_report(parts: Sequence[tuple[str, str, str | None, str | None, str]]) -> RenderableType:
    """The verdict (observe/verdict.py) as a sentence, and what to do next. Each part: id, text, key, gain, level."""
    said = Text()
    for place, (_, text, _, _, level) in enumerate(part for part in parts if part[0] != "next"):
        said.append(text if place == 0 else f" {text}", style=f"bold {STYLE.get(level, '')}" if place == 0 else "")
    lines = [said]
    for id, text, key, gain, _ in parts:
        if id == "next":
            more = f" {gain[0].upper()}{gain[1:]}." if gain else ""
            lines.append(Text(f"next: {text}{more}" + (f"  {key}" if key and key not in text else "")))
    return Group(*lines, Text())


def run_report(folder: Path, record: Record, done: Examination) -> list[RenderableType]:
    steps = len(record.steps)
    few = Text(
        f"\nToo few steps to judge: {steps} step{'s' * (steps != 1)}; most rules need {MIN_STEPS_TO_JUDGE} to 50."
    )
    judged = [f"{len(done.healthy)} rules healthy"] if done.healthy else []
    rest = [f"{len(done.not_judged)} not judged"] if done.not_judged else []
    return [
        _facts(_run_facts(folder, record)),
        *([few] if steps < MIN_STEPS_TO_JUDGE else []),
        *map(_finding, done.findings),
        Text(),
        _verdict(done.findings, [*judged, *rest]),
        _others(done),
    ]


def rules_table(rules: Sequence[DoctorRule]) -> str:
    """Every rule as a Markdown table: what docs/doctor.md holds."""
    head = "| rule | unit | healthy | found when | likely cause | remedy | |\n|---|---|---|---|---|---|---|\n"
    lines = [
        f"| `{rule.id}`: {rule.title} | {rule.unit.replace('|', chr(92) + '|')} | {rule.healthy} | {rule.found_when} "
        f"| {rule.cause} | {rule.remedy} | {rule.kind} |\n"
        for rule in rules
    ]
    return head + "".join(lines)


def _finding(finding: Finding) -> RenderableType:
    style = STYLE[finding.level]
    head = Text.assemble((f"\n{MARK[finding.level]}", f"bold {style}"), f"  {finding.title}  ", (finding.rule, "dim"))
    grid = Table.grid(padding=(0, 2))
    lines = {
        "seen": finding.evidence,
        "unit": finding.unit,
        "healthy": finding.healthy,
        "cause": finding.cause,
        "remedy": finding.remedy,
        "": "safe: it cannot change what is learned"
        if finding.kind == "safe"
        else "advice: it changes what is learned",
    }
    for label, value in lines.items():
        grid.add_row(Text(label, style="dim"), Text(value, style="" if label else "dim", overflow="fold"))
    return Group(head, Padding(grid, (0, 0, 0, 2)))


def _verdict(findings: Sequence[Finding], more: list[str]) -> Text:
    bad, warnings = (sum(finding.level == level for finding in findings) for level in ("bad", "warn"))
    parts = [f"{bad} bad"] * bool(bad) + [f"{warnings} warning{'s' * (warnings > 1)}"] * bool(warnings)
    words = ", ".join([*(parts or ["nothing found"]), *more])
    return Text(words, style=f"bold {STYLE['bad' if bad else 'warn' if warnings else 'ok']}")


def _others(done: Examination) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    if done.healthy:
        grid.add_row(Text("healthy", style="dim"), Text(", ".join(done.healthy), style="dim"))
    reasons: dict[str, list[str]] = {}
    for rule, why in done.not_judged.items():
        reasons.setdefault(why, []).append(rule)
    for at, (why, rules) in enumerate(reasons.items()):
        label = "" if at else "not judged"
        grid.add_row(Text(label, style="dim"), Text(f"{', '.join(rules)}: {why}", style="dim"))
    return grid


def _facts(lines: list[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for label, value in lines:
        grid.add_row(Text(label, style="dim"), Text(value, overflow="fold"))
    return grid


def _run_facts(folder: Path, record: Record) -> list[tuple[str, str]]:
    wanted, done = record.setting("learn.steps", 0), record.steps[-1] if record.steps else 0
    state = "finished" if record.finished else f"last written {duration(record.quiet_s)} ago"
    device = record.setting("run.device", "?")
    solved, scores = record.values("eval/pass@1"), record.values("eval/score")
    measures = (("reward", "reward/mean"), ("loss", "sft/loss"), ("loss", "rm/loss"))
    return [
        ("run", str(folder)),
        ("steps", f"{done} of {wanted or '?'}, {state}"),
        ("learns", f"{_learns(record)}, on {device}"),
        *(
            (label, f"{number(values[0])} → {number(values[-1])}")
            for label, name in measures
            if (values := record.values(name))
        ),
        *([("eval", f"pass@1 {percent(solved[0], 1)} → {percent(solved[-1], 1)}")] if solved else []),
        *([("eval", f"score {number(scores[0])} → {number(scores[-1])}")] if scores else []),
    ]


def _learns(record: Record) -> str:
    if stage := record.setting("stage", ""):
        return LEARNS.get(stage, stage)
    updates = record.updates_per_batch
    policy = "on-policy" if updates == 1 else f"{updates} updates a batch"
    return f"{record.setting('learn.algorithm', '?')}, {policy}"


def _machine_facts(machine: MachineReport) -> list[tuple[str, str]]:
    packages = {name: value for name, value in machine.as_json()["packages"].items() if name != "trimtab"}
    variables = machine.as_json()["variables"]
    limit = "" if machine.host_limit_gib is None else f", {gib(machine.host_limit_gib)} for this container"
    return [
        ("trimtab", f"{machine.packages.get('trimtab', '?')}, Python {machine.python}, {machine.system}"),
        (
            "host",
            f"{machine.cores} cores, {gib(machine.host_available_gib)} of {gib(machine.host_total_gib)} free{limit}",
        ),
        *[("disk", f"{gib(disk.free_gib)} free for {disk.what}: {disk.path}") for disk in machine.disks],
        ("driver", _driver(machine)),
        *_gpus(machine),
        *([("links", links_in_words(machine.torch, machine.driver.links))] if len(machine.gpus) > 1 else []),
        ("packages", ", ".join(f"{name} {value}" for name, value in packages.items()) or "none known"),
        *([("variables", ", ".join(f"{name}={value}" for name, value in variables.items()))] if variables else []),
    ]


def _driver(machine: MachineReport) -> str:
    driver = machine.driver
    if driver.error:
        return driver.error
    return f"{driver.version}, CUDA up to {driver.cuda}" if driver.version else "no NVIDIA driver"


def _gpus(machine: MachineReport) -> list[tuple[str, str]]:
    if not machine.gpus:
        seen = [("GPU", f"{gpu['name']}, {gib(gpu['total_gib'])}, not usable") for gpu in machine.driver.gpus]
        cpu = "on the CPU, in float32: every algorithm works, but only small models are practical"
        return [*seen, ("runs", "nothing runs until torch works" if machine.torch.get("error") else cpu)]
    lines = [("GPU", _gpu(gpu)) for gpu in machine.gpus]
    return [*lines, ("runs", "on the first GPU" if len(lines) > 1 else "on the GPU")]


def _gpu(gpu: Any) -> str:
    """Memory of the device, then of the process that tested it, with its allocations that were retried or failed."""
    capability = ".".join(map(str, gpu["capability"]))
    if gpu.get("error"):
        return f"{gpu['name']}, compute capability {capability}: {gpu['error']}"
    own = f"allocated {gib(gpu['allocated_gib'])}, reserved {gib(gpu['reserved_gib'])}"
    trouble = f"{gpu['alloc_retries']} allocation retries, {gpu['ooms']} out-of-memory errors"
    free = f"{gib(gpu['free_gib'])} of {gib(gpu['total_gib'])} free"
    return f"{gpu['name']}, compute capability {capability}, {free}; the doctor's test process: {own}, {trouble}"
