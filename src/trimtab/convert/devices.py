"""What becomes of flags about devices: how many there are, what each holds a part of, how they talk. All of it is automatic, and
each has a key that pins it; a line says which value of that key a flag's value is."""

from __future__ import annotations

from typing import Any

from trimtab.convert.sheet import Line, Sheet
from trimtab.plan.placement import SHARDS_BUILT

DEVICES = "Trimtab takes as many of the visible GPUs as make a step fastest, a process each; no divisibility is needed"
NODES = "Trimtab takes the GPUs of this machine or, with run.cluster, those of all machines of a Ray cluster"
TOGETHER = "reference, critic and reward models are on the policy's devices unless run.placement gives them others"
SHARD = (
    "Trimtab takes the simplest of none, optimizer, gradients and full (ZeRO 0 to 3) that fits and is fast; "
    "`trimtab plan --devices N` shows what each device then holds"
)
SHARD_GROUP = "all ranks of a host hold one set of parts"
OVERLAP = "Trimtab sums gradients over ranks while the backward pass still runs"
PREFETCH = "weights that fit stay whole on every device, so that no layer is gathered in a forward pass"
OWN_RANKS = "Trimtab has its own ranks: run.devices says how many, and run.shard what each of them holds a part of"
ENGINES = "each device has an engine, and engines take prompts from one queue"
BALANCED = "always on: micro-batches are dealt to devices by the work in them"
ROWS = "devices share a sequence where it does not fit on one, or a step is faster so"
ROWS_PLAN = "Trimtab exchanges heads or gathers keys and values, whichever is cheaper, and has no stride to choose"
LAYERS = (
    "layers are not cut over devices where they are trained: run.shard: full holds weights in parts, run.sequence_parallel "
    "shares long sequences, and run.rollout.tensor_parallel cuts engines"
)
ENGINE_CUT = "a copy of the model is cut over devices where it does not fit on each"
LAUNCH = "sets how processes start; Trimtab starts one for each device by itself"

MODES: dict[Any, str] = {
    0: "none",
    1: "optimizer",
    2: "gradients",
    3: "full",
    "no_shard": "none",
    "shard_grad_op": "gradients",
    "full_shard": "full",
    "hybrid_shard": "full",
    "hybrid_shard_zero2": "gradients",
    "ddp": "none",
    "zero1": "optimizer",
    "zero2": "gradients",
    "zero3": "full",
}
"""Values of `run.shard` by stages of ZeRO and by names of FSDP."""


def say_pins(sheet: Sheet) -> None:
    """Says of each flag about devices what to write to keep its value."""
    for line in sheet.lines:
        if line.given and line.rule is not None and line.outcome == "automatic":
            said = pin_of(line.rule.key, line.rule.name, line.setting.value)
            line.notes += [said] if said else []


def pin_of(key: str, name: str, value: Any) -> str:
    """What to write where a value is meant to stay as it is; empty where that is not known."""
    count = value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
    if key == "run.devices" and count is not None:
        if name.endswith("nodes") and count > 1:
            return (
                f"start Ray on the {count} machines, and write run.cluster: the address of its head (docs/cluster.md)"
            )
        return "" if name.endswith("nodes") else f"write run.devices: {count} to keep that number"
    if key == "run.sequence_parallel" and count is not None and count > 1:
        model = next((model for model in ("ref", "critic") if f"{model}." in name), "")
        of = {"ref": "reference"}.get(model, model)
        return (
            f"write run.sequence_parallel: {{{of}: {count}}} to keep it" if of else f"write {key}: {count} to keep it"
        )
    if key == "run.rollout.tensor_parallel" and count is not None and count > 1:
        return f"write {key}: {count} to keep it, with run.engine: native or vllm"
    if key == "run.shard_devices" and count is not None and count > 1:
        return f"write run.shard_devices: {count} to keep that number"
    if key == "run.shard" and not name.endswith(".*"):  # what a whole family holds is not known
        mode = _mode(name, value)
        if mode and mode not in SHARDS_BUILT:
            return f"it is run.shard: {mode} here, which this version plans but cannot run yet"
        return f"write run.shard: {mode} to keep it" if mode else ""
    return ""


def _mode(name: str, value: Any) -> str:
    if isinstance(value, bool):  # of FSDP: weights are given up after a forward pass, or kept for the backward pass
        return ("full" if value else "gradients") if name.endswith("reshard_after_forward") else ""
    if isinstance(value, str):
        words = value.lower().replace(",", " ").split()
        found = [MODES[word] for word in words if word in MODES]
        file = next((mode for stage, mode in MODES.items() if isinstance(stage, str) and stage in _letters(value)), "")
        return found[0] if found else file
    return MODES.get(value, "") if isinstance(value, int) else ""


def _letters(value: str) -> str:
    """A file's name without what stands between letters: ds_config_zero-3.json holds zero3."""
    return "".join(letter for letter in value.lower() if letter.isalnum() or letter == "/").rsplit("/", 1)[-1]


def launcher_line(line: Line, names: tuple[str, ...]) -> Line:
    """What a launcher is told; a number of processes is a number of devices."""
    name = line.setting.name.strip("-").replace("-", "_")
    if name in ("nnodes", "num_machines"):
        line.notes.append(pin_of("run.devices", "num_nodes", _number(line.setting.value)) or NODES)
    elif name in names:
        line.key = "run.devices"
        line.notes.append(pin_of("run.devices", name, _number(line.setting.value)))
    line.notes[:] = [note for note in line.notes if note]
    return line


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value
