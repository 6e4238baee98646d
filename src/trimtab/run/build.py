"""What runs of every stage are built from: a policy, an updater as the plan has it, the comparison with an earlier session."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.config.known import ResolvedRun
from trimtab.config.load import AnyConfig, load_any
from trimtab.config.reference import STAGES
from trimtab.config.run import Kernels, Run
from trimtab.config.schema import Model, Observe
from trimtab.data.files import mark_of
from trimtab.model import liger
from trimtab.model.adapters import add_adapters, load_adapters
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.load import load_config, load_model, resolve_dtype
from trimtab.model.policy import Policy
from trimtab.observe.console import Console
from trimtab.plan.planner import Plan
from trimtab.record.checkpoint import CONFIG, RunState, load_state, newest_checkpoint, reading
from trimtab.record.folder import changes
from trimtab.rollout.engine import Engine
from trimtab.run.calibrate import corrected, probe
from trimtab.update.updater import Updater

CANNOT_CHANGE = {
    "learn.critic.path": "another critic",
    "learn.optimizer.states": "other moments",
    "model.lora": "other adapters",
}
"""Keys that the optimizer of a checkpoint is made for."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def load_policy(
    model: Model, seed: int, device: torch.device, kernels: Kernels = "auto", checkpoint: Path | None = None
) -> Policy:
    """The model to train, as it came or as a checkpoint left it, with the kernels asked for. `seed` is for new adapters."""
    if model.lora is not None:
        base = load_model(model, device)
        if checkpoint is None:
            found = add_adapters(base, model.lora, seed)
        else:
            with reading(checkpoint):
                found = load_adapters(base, checkpoint)
    elif checkpoint is None:
        found = load_model(model, device)
    else:
        source = Model(path=str(checkpoint), dtype=model.dtype, trust_remote_code=model.trust_remote_code)
        with reading(checkpoint):
            found = load_model(source, device)
    with nullcontext() if checkpoint is None else reading(checkpoint):
        policy = Policy(found)
    use_kernels(policy, kernels)
    return policy


def use_planned_kernels(plan: Plan, *policies: object) -> None:
    """Leave the fused layers where the plan had to: they are chosen before there is a plan."""
    for policy in policies:
        if isinstance(policy, Policy) and plan.run.kernels == "plain":
            use_kernels(policy, "plain")


def update_settings(run: ResolvedRun) -> dict[str, Any]:
    """An Updater's arguments by a plan."""
    return {
        "token_budget": run.token_budget,
        "score_token_budget": run.score_token_budget,
        "logprob_chunk": run.logprob_chunk,
        "checkpoint_activations": run.checkpoint_activations,
        "offload_optimizer": run.offload.optimizer,
        "offload_activations": run.offload.activations,
    }


def is_automatic(asked: Run, plan: Plan) -> bool:
    """The micro-batch is the planner's own choice: neither the user nor `trimtab tune` has set it."""
    tuned = any(choice.key == "run.token_budget" and choice.measured for choice in plan.choices)
    return asked.token_budget == "auto" and not tuned


def calibrated(plan: Plan, asked: Run, updater: Updater, engine: Engine) -> Plan:
    """The plan, and the updater with it, after two micro-batches have been measured, where there is a meter for that."""
    if plan.machine.cpu or not is_automatic(asked, plan):
        return plan
    engine.lend()
    plan = corrected(plan, asked, probe(updater, plan.job, plan.run))
    updater.token_budget = plan.run.token_budget
    updater.score_token_budget = plan.run.score_token_budget
    updater.recompute(plan.run.checkpoint_activations)
    return plan


def _compare(config: AnyConfig, device: torch.device, folder: Path, checkpoint: Path, console: Console) -> list[str]:
    """Say what is no longer as the checkpoint was made, and return it; refuse what its optimizer cannot go on with."""
    held = _config_of(checkpoint, folder)
    if not isinstance(config, type(held)):
        name = next(name for name, schema in STAGES.items() if isinstance(held, schema))
        what, fix = f"{folder} holds a run of trimtab {name}", f"Go on with trimtab {name}, or choose another folder."
        raise ConfigError([Problem("observe.dir", what, fix)])
    changed = changes(held, config)
    for key, what in CANNOT_CHANGE.items():
        found = ", ".join(change for change in changed if change.startswith(key))
        if found:
            told = f"{checkpoint.name} cannot go on with {what} than it has: {found}"
            raise ConfigError([Problem(key, told, f"Write {key} as it was.")])
    if config.model.lora is None:
        trusted = config.model.trust_remote_code
        with reading(checkpoint):
            saved = load_config(Model(path=str(checkpoint), trust_remote_code=trusted)).dtype
        wanted = resolve_dtype(config.model, device)
        if saved is not None and saved != wanted:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (saved, wanted))
            what = f"{folder} was trained in {before} and cannot go on in {now}"
            raise ConfigError([Problem("model.dtype", what, f"Write model.dtype: {before}.")])
    if changed:
        console.warn(f"{checkpoint.name} goes on with other settings than it was made with: {', '.join(changed)}")
    return changed


def _config_of(checkpoint: Path, folder: Path) -> AnyConfig:
    """What the checkpoint was made with."""
    # Not the folder's: a resume with other settings may have ended before its first checkpoint.
    file = (checkpoint if (checkpoint / CONFIG).exists() else folder) / CONFIG
    with reading(checkpoint):
        try:
            return load_any(file)
        except ConfigError as error:  # nobody has written it by hand
            raise ValueError(f"{file}: {error.problems[0]}") from error


def take_up(
    config: AnyConfig,
    device: torch.device,
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    resume: bool,
    console: Console,
) -> tuple[Path | None, RunState, list[str]]:
    """The checkpoint that a run goes on from, where it does, the state of the run, and which settings have changed since."""
    checkpoint, state, changed = newest_checkpoint(folder) if resume else None, RunState(), list[str]()
    if checkpoint is not None:
        state = load_state(checkpoint)
        changed = _compare(config, device, folder, checkpoint, console)
    elif resume:
        console.note(f"there is no checkpoint to resume in {folder}: the run starts at its first step")
    _note_data(state, rows, console)
    return checkpoint, state, changed


def _note_data(state: RunState, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Remember which rows are trained on, and say so where they are not those that the run has counted so far."""
    before, state.data_mark = state.data_mark, mark_of(rows)
    if before and before != state.data_mark:
        console.warn(
            f"data.train is not what it was: {state.data_mark} (was {before}). Counting goes on at {state.data_position}, so "
            "some rows may be trained on twice in this pass, others not at all"
        )


@contextmanager
def own_modes() -> Iterator[None]:
    """Gradients are computed, and in the model's own type, whatever the caller has set for torch."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # which turns gradients on, too
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def returns_memory(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """What a run has held is free when it returns. Its objects refer to each other, so Python would free them some time later: a
    second run in the same process (a notebook) would find the first one's weights and optimizer still on the device."""

    @functools.wraps(run)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return run(*args, **kwargs)
        finally:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    return wrapper


def card_facts(config: AnyConfig, policy: Policy, plan: Plan) -> dict[str, Any]:
    """Facts for a start card: the model, the machine, and what was decided."""
    cuda = policy.device.type == "cuda"
    properties = torch.cuda.get_device_properties(policy.device) if cuda else None
    return {
        "model": config.model.path,
        "parameters": policy.parameter_count(),
        "trainable_parameters": sum(p.numel() for p in policy.parameters()),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": properties.name if properties else "CPU",
        "update": policy.description,
        "device_peak_gib": plan.ledger.fullest.device_bytes / GIB if cuda else None,
        "device_total_gib": properties.total_memory / GIB if properties else None,
        "host_peak_gib": plan.ledger.fullest_host.host_bytes / GIB,
        "host_total_gib": psutil.virtual_memory().total / GIB,
        "choices": [(c.key, c.value, c.why) for c in plan.choices],
    }


def refuse_kernels(run: Run, model: Model, device: torch.device) -> None:
    """What `run.kernels` asks for and cannot have here, as far as that is known without weights."""
    if run.kernels == "liger":
        liger.refuse(load_config(model).get_text_config().model_type, device)
    elif run.kernels == "native" and device.type != "cuda":
        what = "fused layers run on a CUDA device only, and this run is on the CPU"
        raise ConfigError([Problem("run.kernels", what, "Write auto.")])


def refuse_missing_wandb(observe: Observe) -> None:
    if observe.wandb and importlib.util.find_spec("wandb") is None:
        fix = "Install it with: pip install 'trimtab[wandb]', or remove the key."
        raise ConfigError([Problem("observe.wandb", "the wandb package is not installed", fix)])


def spare_the_collector(stack: ExitStack) -> None:
    """Modules and models live as long as the run. Looking through them again and again for cycles stops the host for 0.2 s at a
    time, while the device waits (docs/log.md)."""
    if gc.get_freeze_count():
        return  # the caller has done it, and decides when it ends
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)
