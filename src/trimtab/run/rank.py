"""The program of a rank: one device's share of a run. `main` is called with the descriptor of its channel (cluster/serve.py).

A rank builds what a run on one device has (policy, reference, critic, optimizer, engine) and carries out the driver's orders. It
decides nothing: what is sampled, how work is dealt, what is lowered when memory runs out and when a step is applied come from the
driver, so all ranks do the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import TrimtabError
from trimtab.base.spans import Taken, log
from trimtab.cluster.mesh import LOCALHOST, GroupBroken, Meeting, Mesh
from trimtab.cluster.serve import Link, serve
from trimtab.cluster.trainer import WriteFailed
from trimtab.cluster.transfer import ChannelSetup, Transferred, whole_weights
from trimtab.cluster.updater import UpdaterFacts
from trimtab.config.known import ResolvedRun
from trimtab.config.resolved import ResolvedConfig, with_offline_plan, with_plan
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Recompute
from trimtab.model.memory import Shortage, attempt, free, is_out_of_memory
from trimtab.model.policy import AnyPolicy
from trimtab.model.sharded import ShardedPolicy
from trimtab.observe.meters import MemoryMeter
from trimtab.plan.governor import Governor
from trimtab.plan.job import Correction, Job
from trimtab.plan.ledger import CHECKPOINT_COPY
from trimtab.plan.planner import Plan
from trimtab.plan.trials import Trial
from trimtab.record.behind import WriteBehind
from trimtab.record.folder import ENGINE_LOGS
from trimtab.record.host_copy import HostCopy
from trimtab.record.layout import RANK_LOGS
from trimtab.record.part import CheckpointPart, PartWritten, copy_part, write_part
from trimtab.record.saving import refuse_diverged
from trimtab.rollout.external.lent import LentDevice
from trimtab.rollout.seat import EngineMeeting, seat_of
from trimtab.run.build import PolicyFacts, own_modes, policy_facts, update_settings, use_planned_kernels
from trimtab.run.calibrate import probe
from trimtab.run.machine import load_within, memory_limit
from trimtab.run.models import load_policies, load_sharded_policies, put_reference_away
from trimtab.run.profile import ProfileOrders
from trimtab.run.rollout_orders import LinkReports, RolloutOrders, load_classifiers
from trimtab.run.same_ranks import refuse_folder_of_rank, software_here
from trimtab.run.shapes import shape_of
from trimtab.run.stage import CheckedRun, Stage
from trimtab.run.tuner import time_decode, timed_update
from trimtab.update.shares import Share
from trimtab.update.stats import Applied, Scored, Trained, UpdateStats
from trimtab.update.trainer import LocalTrainer
from trimtab.update.updater import Progress, Updater


@dataclass(frozen=True)
class RankSetup:
    """What a rank is made from."""

    rank: int
    ranks: int
    store_port: int
    """Where ranks meet, on the driver's machine."""
    prefix: str
    """Of this set of ranks there: another one may have been lost before."""
    backend: str
    """nccl, or gloo where ranks have no GPU each."""
    device: str
    stage: Stage
    ready: CheckedRun
    plan: Plan
    checkpoint: Path | None
    reward_models: tuple[str, ...] = ()
    """Paths of the models that rewards come from."""
    devices: tuple[str, ...] = ()
    """Of all ranks."""
    store_host: str = LOCALHOST
    """The driver's machine, as ranks see it."""
    channel: ChannelSetup | None = None
    """Where other ranks generate: how they are sent weights."""
    elsewhere: frozenset[str] = frozenset()
    """Roles of the run that other ranks have."""


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself once it is built."""

    policy: PolicyFacts
    engine: str
    """How its rollout runs."""
    lowered: dict[str, int]
    updaters: dict[str, UpdaterFacts]
    software: dict[str, str]
    """Versions of what computes."""


COLLECTIVE: dict[str, frozenset[str]] = {
    "none": frozenset({"accumulate"}),
    "optimizer": frozenset({"accumulate"}),
    "gradients": frozenset({"accumulate"}),
    "full": frozenset(
        {
            "accumulate",
            "count_choices",
            "score",
            "time_update",
            "publish",
            "send_weights",
            "reserve_copy",
            "capture",
            "export",
        }
    ),
}
"""Orders in which ranks wait for each other, by `run.shard`. `apply` is one too: a rank that fails there cannot go on. Under
`none` and `optimizer` sums wait that were begun, not ranks: one that is short begins the rest (`Relieved`), if it can."""


class Relieved(MemoryError):
    """Memory ran out, and nobody waits for this rank any more."""


class HalfApplied(Exception):
    """Weights may be between two steps. Not the user's, nor a shortage that is survived: the rank ends."""


class Rank(RolloutOrders, ProfileOrders):
    """What the driver's orders are carried out on: each public method is one."""

    def __init__(self, setup: RankSetup, link: Link) -> None:
        self._link = link
        log.on = True
        ready, plan = setup.ready, setup.plan
        refuse_folder_of_rank(ready.folder, setup.rank)
        device = torch.device(setup.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(plan.run.threads)
        self._stack = ExitStack()
        self._stack.enter_context(memory_limit(ready.config.run, device))
        meeting = Meeting(
            setup.store_port, setup.prefix, setup.rank, setup.ranks, setup.backend, device, setup.store_host
        )
        self._trace_file = self._folder_of(setup) / f"rank-{setup.rank}.json"
        self._sharing = row_ranks(plan.run)
        """Ranks that share each micro-batch, by the model."""
        shards = 1 if plan.run.shard == "none" else plan.run.shard_devices
        self._mesh = Mesh(meeting, shards, {size for size in self._sharing.values() if size > 1})
        self._collective = COLLECTIVE.get(plan.run.shard, frozenset())
        if max(self._sharing.values()) > 1:
            self._collective |= {"accumulate", "score", "time_update", "count_choices"}
        self._build(setup, device)

    def _folder_of(self, setup: RankSetup) -> Path:
        """Where this rank's log is."""
        return Path(setup.ready.folder) / RANK_LOGS

    def _build(self, setup: RankSetup, device: torch.device) -> None:
        stage, ready, plan, mesh = setup.stage, setup.ready, setup.plan, self._mesh
        asked, compares = ready.config.run, "reference" not in setup.elsewhere
        self._ready, self._rank, self._ranks, self._device = ready, setup.rank, setup.ranks, device
        logs = ready.folder / ENGINE_LOGS / f"rank-{setup.rank}"
        self._copy = HostCopy(device) if CHECKPOINT_COPY in plan.ledger["checkpoint"].host else None
        self._behind = WriteBehind()
        self._captured: CheckpointPart | None = None
        self._is_copy = False
        self._written: PartWritten | None = None
        if plan.run.shard == "full":
            policy, reference = load_within(
                asked,
                device,
                load_sharded_policies,
                ready.config,
                plan.run,
                device,
                setup.checkpoint,
                mesh.device_mesh,
                mesh,
                compares,
            )
        else:
            policy, reference = load_within(
                asked, device, load_policies, ready.config, device, setup.checkpoint, mesh, compares
            )
        use_planned_kernels(plan, policy, reference)
        reference = put_reference_away(reference, plan.run)
        meeting = EngineMeeting(setup.store_host, setup.store_port, setup.prefix, setup.backend)
        seat = seat_of(setup.rank, setup.devices, plan.engine_devices, meeting)
        reports: Any = LinkReports(self._link)
        _, engine = stage.open_engine(ready, plan, policy, reports, logs, lambda what: None, seat)
        self._use_engine(engine, load_classifiers(setup.reward_models, device, policy.dtype))
        self._meter = MemoryMeter(device, outside=lambda: engine.non_torch_bytes)
        updater = Updater(
            policy,
            stage.objective(ready.config, policy),
            ready.config.learn,
            **update_settings(plan.run),
            metered=lambda: self._meter.phase("optimizer"),
            peers=mesh,
        )
        sampled = isinstance(ready.config, ResolvedConfig)
        config = with_plan(ready.config, plan.run) if sampled else with_offline_plan(ready.config, plan.run)
        cut = mesh.device_mesh if isinstance(policy, ShardedPolicy) else None
        critic = None if "critic" in setup.elsewhere else stage.open_critic(config, device, cut, mesh)
        self._policy, self._reference = policy, reference
        self._share_rows(
            setup, {"policy": policy, "reference": reference, "critic": None if critic is None else critic.policy}
        )
        self._updaters: dict[str, Updater] = {"policy": updater} | ({} if critic is None else {"critic": critic})
        self._trainer = LocalTrainer(
            updater, engine, Governor(plan, False, False, 1), ready.tokenizer, reference=reference, critic=critic,
            longest=0, shorter="", report=lambda recovery: self._link.tell("memory", str(recovery)),
        )  # fmt: skip
        if setup.checkpoint is not None:
            self._trainer.load(setup.checkpoint)
        self._active = updater
        self._channel = setup.channel.open(0, device) if setup.channel is not None and setup.rank == 0 else None
        self._link.progress = self._progress

    def _share_rows(self, setup: RankSetup, models: Mapping[Scored, AnyPolicy | None]) -> None:
        """Tell models which ranks run the same rows."""
        config = setup.ready.config
        for name, model in models.items():
            if model is None or self._sharing[name] == 1:
                continue
            critic = config.learn.critic.path if name == "critic" and isinstance(config, ResolvedConfig) else None
            shape = shape_of(critic or config.model.path, config.model.trust_remote_code)
            model.sequence = self._mesh.sequence_group(self._sharing[name], shape.attention_sizes)

    def ready(self) -> RankFacts:
        updaters = {name: facts_of(updater) for name, updater in self._updaters.items()}
        facts = policy_facts(self._policy, self._ready.tokenizer)
        return RankFacts(facts, self._engine.description, self._engine.lowered, updaters, software_here())

    # The update

    def count_choices(self, model: Trained, share: Share) -> torch.Tensor:
        self._active = self._updaters[model]
        return self._updaters[model].count_choices(share)

    def accumulate(self, model: Trained, share: Share, kl_coef: float) -> UpdateStats:
        self._active = updater = self._updaters[model]
        if not updater.overlaps or updater.policy.sequence is not None:  # others wait for this rank inside a pass, then
            return updater.accumulate_share(share, kl_coef).on_host()
        outcome = attempt(lambda: updater.accumulate_share(share, kl_coef).on_host())
        if isinstance(outcome, Shortage):
            updater.abandon()
            raise Relieved(outcome.message)
        return outcome

    @contextmanager
    def around(self, method: str) -> Iterator[None]:
        """In orders that have collectives in them, a rank that fails frees those that wait for it, which then say that they were
        freed."""
        try:
            yield
        except (TrimtabError, Relieved):
            raise  # for the user, from all ranks or at a place where none waits
        except Exception as error:
            if method not in self._collective:
                raise
            freed = not is_out_of_memory(error) and self._mesh.was_aborted
            traceback.clear_frames(error.__traceback__)  # they hold groups
            self._lose_peers()
            for model in self._sharded_models():
                model.ungroup()
            self._mesh.abort()
            if freed:
                raise GroupBroken from error
            raise

    @property
    def parted(self) -> bool:
        return not self._mesh.joined

    def rejoin(self) -> None:
        self._lose_peers()
        self._mesh.rejoin()
        for model in self._sharded_models():
            model.regroup(self._mesh.device_mesh)

    def _lose_peers(self) -> None:
        """What is under way holds groups, too."""
        for updater in self._updaters.values():
            updater.lose_peers()

    def _sharded_models(self) -> list[ShardedPolicy]:
        models = [*(updater.policy for updater in self._updaters.values()), self._reference]
        return [model for model in models if isinstance(model, ShardedPolicy)]

    def calibrate(self, job: Job, run: ResolvedRun) -> Correction:
        return probe(self._updaters["policy"], job, run)

    def send_weights(self, version: int) -> Transferred:
        """Send the weights to the ranks that generate. All are asked: where they hold the weights in parts, all are needed. One
        sends."""
        if self._channel is not None:
            return self._channel.pass_on(self._policy, version)
        moved = sum(weight.nbytes for weight in whole_weights(self._policy)) if self._sharded_models() else 0
        return Transferred(0.0, moved)

    def time_update(self, job: Job, budget: int) -> Trial:
        return timed_update(self._updaters["policy"], job, budget)

    def time_decode(self, job: Job, sequences: int) -> Trial | None:
        return None if isinstance(self._engine, LentDevice) else time_decode(self._engine, job, sequences)

    def prepare(self, model: Trained) -> None:
        self._updaters[model].prepare()

    def apply(self, model: Trained, lr: float) -> Applied:
        outcome = attempt(self._updaters[model].apply, lr)
        if isinstance(outcome, Shortage):  # others wait for this rank in a collective: it cannot go on
            raise HalfApplied(f"the optimizer step was applied in part: {outcome.message}")
        return outcome

    def score(self, model: Trained, by: Scored, share: Share, field: str) -> list[tuple[int, Any]]:
        self._active = self._updaters[model]
        scorer = self._reference if by == "reference" else self._updaters[by].policy
        assert scorer is not None
        self._active.score_share(share, scorer, field)
        if self._rank % self._sharing[by]:
            return []  # the first of those that share rows says it
        own = len(share.batches) - share.fillers
        return [
            (place, getattr(sample, field))
            for batch, places in zip(share.batches[:own], share.places[:own])
            for sample, place in zip(batch, places)
        ]

    def abandon(self, model: Trained) -> None:
        self._updaters[model].abandon()

    def recompute(self, model: Trained, activations: Recompute) -> None:
        self._updaters[model].recompute(activations)

    def offload_activations(self, model: Trained) -> None:
        self._updaters[model].offload_activations()

    def offload_optimizer(self, model: Trained) -> None:
        self._updaters[model].offload_optimizer()

    def set(self, model: Trained, name: str, value: int) -> None:
        setattr(self._updaters[model], name, value)

    def alloc_retries(self, model: Trained) -> int | None:
        return self._updaters[model].alloc_retries()

    def communication(self) -> tuple[float, int]:
        """Seconds and bytes of collectives since the last call."""
        return self._mesh.take()

    # Checkpoints

    def reserve_copy(self) -> None:
        """Take the memory for a copy of this rank's part of a checkpoint."""
        if self._copy is not None:
            self._copy.reserve(self._part().nbytes)

    def capture(self, run_dir: Path, step: int) -> bool:
        """Fix what this rank has of a checkpoint as it is now. True: it is a copy, and training may go on."""
        part = self._part()
        refuse_diverged(part, run_dir, step)
        self._is_copy = self._copy is not None and self._copy.reserve(part.nbytes)
        if self._is_copy:
            assert self._copy is not None
            part = copy_part(part, self._copy)
        self._captured = part
        return self._is_copy

    def begin_write(self, folder: Path) -> None:
        """Write what was captured into a folder, in a thread where that reads a copy."""
        assert self._captured is not None
        part, self._captured = self._captured, None
        self._written = None

        def write() -> None:
            self._written = write_part(folder, part)

        self._behind.start(write)
        if not self._is_copy and self._device.type == "cuda":
            self._behind.wait()

    def is_written(self) -> bool:
        return self._behind.ended or not self._behind.busy

    def end_write(self) -> PartWritten:
        """What was written, once it is on disk. Raises what kept it from that."""
        try:
            self._behind.wait()
        except OSError as error:
            raise WriteFailed(str(error), error.errno) from error
        assert self._written is not None
        return self._written

    def _part(self) -> CheckpointPart:
        return self._trainer.part_of_rank(self._rank, self._ranks)

    # The rest

    def export(self, folder: Path, scores: Mapping[str, Any] | None) -> None:
        """All ranks are asked: where they hold the weights in parts, all are needed. One writes."""
        writes = self._rank == 0
        whole = self._policy.whole_copy(writes) if isinstance(self._policy, ShardedPolicy) else self._policy
        if writes:
            self._trainer.export(folder, scores, whole)

    def free(self) -> None:
        free(self._device)

    def begin_phase(self, name: str) -> None:
        self._meter.begin(name)

    def end_phase(self) -> None:
        self._meter.end()

    def peaks(self) -> dict[str, float]:
        """Peaks of device memory by phase since the last call, in GiB."""
        return self._meter.take_peaks()

    def observed(self) -> tuple[dict[str, float], Taken]:
        """Where the update went since the last call, in seconds, and what was logged."""
        return self._trainer.update_parts(), log.take()

    def facts_of_shortage(self) -> Progress:
        """Where the pass was that ran out of memory."""
        return replace(self._active.progress)

    def _progress(self) -> Any:
        self._look_at_store()
        return self._active.progress.part, self._active.progress.microbatch, *self._rollout_progress()

    def _look_at_store(self) -> None:
        """What this rank is told there while its own thread may hang."""
        with suppress(RuntimeError, OSError):  # the driver is gone, or the folder
            self._mesh.leave_if_asked()
            self._mesh.write_trace_if_asked(self._trace_file)


def facts_of(updater: Any) -> UpdaterFacts:
    """What an updater, or what only scores, says of itself."""
    return UpdaterFacts(
        token_budget=updater.token_budget,
        score_token_budget=updater.score_token_budget,
        logprob_chunk=updater.logprob_chunk,
        checkpoint_activations=updater.checkpoint_activations,
        piece=updater.piece,
        fused=updater.fused,
        activations_offloaded=updater.activations_offloaded,
        optimizer_offloaded=updater.optimizer_offloaded,
        state_bytes=updater.state_bytes,
        trained=updater.trained,
        parameters=updater.parameters,
        layer_input_bytes=updater.layer_input_bytes(1),
        device=updater.device,
        balances=updater.balances,
    )


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, Rank)
