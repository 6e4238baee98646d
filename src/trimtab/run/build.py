"""What runs of every stage are built from: a policy, an updater with the sizes of the plan, checks of packages and kernels."""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.config.known import ResolvedRun
from trimtab.config.load import AnyConfig
from trimtab.config.run import Kernels, Run
from trimtab.config.schema import Model, Observe
from trimtab.model import liger
from trimtab.model.adapters import add_adapters, load_adapters
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.load import load_config, load_model, remember_whole, resolve_dtype, stop_token_ids
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.plan.job import Correction, Job
from trimtab.plan.planner import Plan
from trimtab.record.checkpoint import explain_load_errors
from trimtab.record.prometheus import refuse_prometheus
from trimtab.rollout.engine import Engine
from trimtab.run.calibrate import corrected
from trimtab.run.read_once import WeightReader
from trimtab.update.peers import ALONE, Peers
from trimtab.update.updater import AnyUpdater

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def load_policy(
    model: Model,
    seed: int,
    device: torch.device,
    kernels: Kernels = "auto",
    checkpoint: Path | None = None,
    shards: int = 1,
    mesh: DeviceMesh | None = None,
    prefetch: int = 1,
    peers: Peers = ALONE,
) -> Policy:
    """The model to train, as it came or as a checkpoint left it, with the kernels asked for. `seed` is for new adapters;
    `shards`: ranks that cut its units. `mesh`: ranks that hold its weights in parts, of which `prefetch` layers are gathered
    ahead; it is then read into host memory. `peers`: ranks that load it, too, of which one reads it."""
    reader = WeightReader(peers, model.trust_remote_code)
    with nullcontext() if checkpoint is None else explain_load_errors(checkpoint):
        if mesh is None:
            found = reader.whole(lambda: read_trained(model, seed, device, checkpoint), device)
            policy = Policy(found, shards=shards)
        else:
            known, home = with_known_dtype(model, device), torch.device("cpu")
            found = reader.without_values(lambda: read_trained(known, seed, home, checkpoint))
            policy = ShardedPolicy(found, mesh, device, prefetch=prefetch, fetch=reader.fetch)
    use_kernels(policy, kernels)
    return policy


def read_trained(model: Model, seed: int, device: torch.device, checkpoint: Path | None) -> Any:
    """The model to train from its files, with its adapters where it has some."""
    if model.lora is not None:
        base = load_model(model, device)
        if checkpoint is None:
            return add_adapters(base, model.lora, seed)
        with explain_load_errors(checkpoint):
            return load_adapters(base, checkpoint)
    if checkpoint is None:
        return load_model(model, device)
    source = Model(path=str(checkpoint), dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    with explain_load_errors(checkpoint):
        loaded = load_model(source, device)
    return remember_whole(loaded, model)


def with_known_dtype(model: Model, device: torch.device) -> Model:
    """The same model wherever it is read: `auto` is what it means on `device`."""
    return model.with_values({"dtype": str(resolve_dtype(model, device)).removeprefix("torch.")})


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
        "reduce_early": run.shard == "gradients" and run.devices > 1,
        "overlap": run.overlap,
    }


def is_automatic(asked: Run, plan: Plan) -> bool:
    """The micro-batch is the planner's own choice: neither the user nor `trimtab tune` has set it."""
    tuned = any(choice.key == "run.token_budget" and choice.measured for choice in plan.choices)
    return asked.token_budget == "auto" and not tuned


def calibrated(
    plan: Plan,
    asked: Run,
    updaters: Iterable[AnyUpdater],
    engine: Engine,
    measure: Callable[[Job, ResolvedRun], Correction],
) -> Plan:
    """The plan, and updaters with it, after two micro-batches have been measured, where there is a meter for that."""
    if plan.machine.cpu or not is_automatic(asked, plan):
        return plan
    engine.lend()
    plan = corrected(plan, asked, measure(plan.job, plan.run))
    for updater in updaters:
        updater.token_budget = plan.run.token_budget
        updater.score_token_budget = plan.run.score_token_budget
        updater.recompute(plan.run.checkpoint_activations)
    return plan


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


@dataclass(frozen=True)
class PolicyFacts:
    """What a user is told of a loaded model."""

    parameters: int
    trained: int
    dtype: str
    description: str
    """How forward and backward passes run."""
    device: str
    device_total_gib: float | None
    """None on a CPU."""
    stop_token_ids: list[int]


def policy_facts(policy: Policy, tokenizer: Any) -> PolicyFacts:
    cuda = policy.device.type == "cuda"
    properties = torch.cuda.get_device_properties(policy.device) if cuda else None
    return PolicyFacts(
        parameters=policy.parameter_count(),
        trained=sum(p.numel() for p in policy.parameters()),
        dtype=str(policy.dtype).removeprefix("torch."),
        description=policy.description,
        device=properties.name if properties else "CPU",
        device_total_gib=properties.total_memory / GIB if properties else None,
        stop_token_ids=stop_token_ids(policy.model, tokenizer),
    )


def card_facts(config: AnyConfig, policy: PolicyFacts, plan: Plan) -> dict[str, Any]:
    """Facts for a start card: the model, the machine, and what was decided."""
    cuda = policy.device_total_gib is not None
    return {
        "model": config.model.path,
        "parameters": policy.parameters,
        "trainable_parameters": policy.trained,
        "dtype": policy.dtype,
        "device": _devices_in_words(config.run, policy.device, plan),
        "update": policy.description,
        "device_peak_gib": plan.ledger.fullest.device_bytes / GIB if cuda else None,
        "device_total_gib": policy.device_total_gib,
        "host_peak_gib": plan.ledger.fullest_host.host_bytes / GIB,
        "host_total_gib": psutil.virtual_memory().total / GIB,
        "choices": [(c.key, c.value, c.why) for c in plan.choices],
    }


def _devices_in_words(run: Run, name: str, plan: Plan) -> str:
    devices = plan.run.devices
    if not isinstance(run.placement, str):
        shard = f", shard: {plan.run.shard}" if devices > 1 else ""
        asked = run.placement
        if asked.keys() == {"actor", "rollout"}:
            return f"{devices} × {name} that train{shard}, {asked['rollout']} × {name} that generate"
        sets = {owner: [role for role in asked if asked[role] == owner] for owner in asked if asked[owner] not in asked}
        groups = [f"{asked[owner]} × {name}: {' + '.join([owner, *more])}" for owner, more in sets.items()]
        return ", ".join(groups) + shard
    return name if devices == 1 else f"{devices} × {name}, shard: {plan.run.shard}"


def refuse_kernels(run: Run, model: Model, device: torch.device) -> None:
    """What `run.kernels` asks for and cannot have here, as far as that is known without weights."""
    if run.kernels == "liger":
        liger.refuse(load_config(model).get_text_config().model_type, device)
    elif run.kernels == "native" and device.type != "cuda":
        what = "fused layers need a CUDA device, and this run is on the CPU"
        raise ConfigError([Problem("run.kernels", what, "Write auto.")])


def refuse_missing_sinks(observe: Observe) -> None:
    """Where metrics shall go and cannot: a package that is missing, a port that is taken."""
    for name, asked in (("wandb", observe.wandb), ("trackio", observe.trackio)):
        if asked and importlib.util.find_spec(name) is None:
            fix = f"Install it with: pip install 'trimtab[{name}]', or remove the key."
            raise ConfigError([Problem(f"observe.{name}", f"the {name} package is not installed", fix)])
    refuse_prometheus(observe)


def spare_the_collector(stack: ExitStack) -> None:
    """Modules and models live as long as the run. Looking through them again and again for cycles stops the host for 0.2 s at a
    time, while the device waits (docs/log.md)."""
    if gc.get_freeze_count():
        return  # the caller has done it, and decides when it ends
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)
