"""The Trainer of one device: a policy and what it is trained with, in this process.

It owns the policy, the reference, the critic, their optimizers and what survives a lack of memory; nobody else touches them while
a run goes on. Its methods take and give plain data, so that several devices can answer the same calls (run/roles.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.model.adapters import has_adapters
from trimtab.model.folder import other_files
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.plan.governor import Governor, Move
from trimtab.record.checkpoint import RunState, explain_load_errors, load_optimizer, load_part
from trimtab.record.part import CheckpointPart, Stateful, collect
from trimtab.record.saving import PendingCheckpoint
from trimtab.record.writer import CheckpointWriter
from trimtab.rollout.engine import Engine
from trimtab.rollout.no_rollout import NoRollout
from trimtab.update.batch import Sample
from trimtab.update.critic import critic_files, restore_critic
from trimtab.update.export import export_classifier, export_model
from trimtab.update.guard import Guard, Recovery
from trimtab.update.objectives.preferences import BradleyTerry
from trimtab.update.pass_clock import update_parts
from trimtab.update.stats import Applied, PassSettings, Scored, Trained, UpdateStats
from trimtab.update.updater import Updater

REWARD_HEAD = "reward_head.safetensors"


class GuardedTrainer:
    """What every Trainer has in common: models that score and learn, each under a guard, and a governor of micro-batches."""

    def __init__(self, guard: Guard, governor: Governor, scorers: Mapping[Scored, Any], critic: Guard | None) -> None:
        """`scorers`: what an updater is given to score samples with, by the model's name."""
        self.guard, self._governor, self._scorers = guard, governor, scorers
        self.on_move: Callable[[Move, Move], object] = lambda before, after: None
        """Told of each change of the micro-batches' size, before it is made."""
        self._guards: dict[str, Guard] = {"policy": guard} | ({} if critic is None else {"critic": critic})

    def score(self, samples: Sequence[Sample], field: str, by: Scored = "policy") -> None:
        self._guards.get(by, self.guard).score(samples, self._scorers[by], field)

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0, model: Trained = "policy") -> UpdateStats:
        return self._guards[model].accumulate(samples, kl_coef)

    def apply(self, lr: float, model: Trained = "policy") -> Applied:
        return self._guards[model].apply(lr)

    def place_of(self, model: Scored) -> int:
        return 0

    @property
    def begun(self) -> int:
        return sum(guard.updater.begun for guard in self._guards.values())

    @property
    def lost(self) -> bool:
        return False

    @property
    def settings(self) -> PassSettings:
        updater = self.guard.updater
        return PassSettings(
            updater.token_budget, updater.checkpoint_activations, updater.logprob_chunk, updater.activations_offloaded
        )

    def end_step(self) -> dict[str, float]:
        return self.guard.end_step()

    def adapt(self, metrics: Mapping[str, float]) -> None:
        updater = self.guard.updater
        now = Move(updater.token_budget, updater.checkpoint_activations)
        move = self._governor.next_move(metrics, now, self.guard.ceiling.get("token_budget"))
        if move is not None:
            self.on_move(now, move)
            updater.token_budget = move.budget
            updater.recompute(move.recompute)

    def memory(self) -> dict[str, Any]:
        return self.guard.memory()

    def recall(self, memory: dict[str, Any]) -> dict[str, Any]:
        """Begin as low as an earlier session of the run left it. Returns what is lower for it."""
        return self.guard.restore(memory)


class LocalTrainer(GuardedTrainer):
    """See run/roles.py. `engine` may have to give up memory for the update."""

    def __init__(
        self,
        updater: Updater,
        engine: Engine,
        governor: Governor,
        tokenizer: Any,
        *,
        reference: AnyPolicy | None = None,
        critic: Updater | None = None,
        longest: int,
        shorter: str,
        copy_checkpoints: bool = False,
        report: Callable[[Recovery], None] = lambda recovery: None,
        report_critic: Callable[[Recovery], None] = lambda recovery: None,
    ) -> None:
        """`longest`: tokens of the longest sequence it can meet. `shorter`: what to write in a config for shorter ones.
        `copy_checkpoints`: the plan has host memory for a copy of a checkpoint while that is written."""
        self.updater, self.reference, self.critic = updater, reference, critic
        self._tokenizer = tokenizer
        guard = Guard(updater, engine, least_kv_tokens=longest, shorter=shorter, report=report)
        scorers: dict[Scored, Any] = {"policy": updater.policy, "reference": reference}
        value_guard = None
        if critic is not None:
            # It has budgets of its own. A resumed run finds them anew.
            value_guard = Guard(critic, NoRollout(), least_kv_tokens=0, shorter=shorter, report=report_critic)
            scorers["critic"] = critic.policy
        super().__init__(guard, governor, scorers, value_guard)
        self.writer = CheckpointWriter(updater.policy.device, guard.run, copy_checkpoints)
        for each in self._guards.values():
            each.before_recovery = self.writer.before_change  # which may move what is being saved
        self._folder_files: dict[str, bytes] = {}
        """What a checkpoint holds of the model beside its weights."""

    def apply(self, lr: float, model: Trained = "policy") -> Applied:
        self.writer.before_change()
        return super().apply(lr, model)

    def end_step(self) -> dict[str, float]:
        return super().end_step() | self.writer.take_metrics() | self.update_parts()

    def update_parts(self) -> dict[str, float]:
        """Where the updates since the last call went, in seconds."""
        updaters = [self.updater, *([] if self.critic is None else [self.critic])]
        return update_parts([clock for updater in updaters for clock in updater.take_clocks()])

    def tell_written(self, on_written: Callable[[float, float], None]) -> None:
        """Have somebody told of each checkpoint: when its write began and ended, in seconds of `time.perf_counter`."""
        self.writer.on_written = on_written

    def prepare_to_save(self) -> None:
        """Do now what the first checkpoint would wait for."""
        self._folder_files = other_files(self.updater.policy.model, self._tokenizer)
        self.writer.prepare(self._part().nbytes)

    def save(self, folder: Path, state: RunState, keep: int, files: Mapping[str, bytes]) -> None:
        self.writer.save(self._part, PendingCheckpoint(folder, state, keep, files))

    def settle_saves(self, wait: bool = True) -> None:
        if wait:
            self.writer.wait()
        else:
            self.writer.raise_if_failed()

    def close(self) -> None:
        """What is being saved is on disk."""
        self.writer.close()

    def load(self, checkpoint: Path) -> None:
        """Make optimizers, critic and heads what they were; the policy was loaded from the checkpoint."""
        objective = self.updater.objective
        if isinstance(objective, BradleyTerry):
            with explain_load_errors(checkpoint):
                objective.head.load_state_dict(load_part(checkpoint / REWARD_HEAD))
        load_optimizer(checkpoint, self.updater.optimizer)
        if self.critic is not None:
            with explain_load_errors(checkpoint):
                restore_critic(checkpoint, self.critic, load_part)

    def export(self, folder: Path, scores: Mapping[str, Any] | None = None, policy: Policy | None = None) -> None:
        """`policy`: a copy with the whole weights, where the trained one has only a part."""
        updater, policy = self.updater, policy or self.updater.policy
        if isinstance(updater.objective, BradleyTerry):
            assert scores is not None
            head = updater.objective.head
            export_classifier(policy, head, self._tokenizer, self.guard, folder, scores)
        else:
            export_model(policy, self._tokenizer, self.guard, folder)

    def _part(self) -> CheckpointPart:
        """All that a checkpoint has, as it is now."""
        model = self.updater.policy.model
        self._folder_files = self._folder_files or other_files(model, self._tokenizer)
        return collect(model, self.updater.optimizer, self._other_tensors(), self._folder_files)

    def part_of_rank(self, rank: int, ranks: int) -> CheckpointPart:
        """What one of several ranks has of a checkpoint, as it is now."""
        model = self.updater.policy.model
        if rank == 0 and not self._folder_files:
            policy = self.updater.policy
            # Parts of a model are masters: it would say that it computes in their type.
            described = policy.skeleton if isinstance(policy, ShardedPolicy) and not has_adapters(model) else model
            self._folder_files = other_files(described, self._tokenizer)
        return collect(model, self.updater.optimizer, self._other_tensors(), self._folder_files, rank, ranks)

    def _other_tensors(self) -> Mapping[str, Mapping[str, torch.Tensor] | Stateful]:
        """Tensors of a checkpoint beside the policy's and its optimizer's, by file."""
        objective = self.updater.objective
        if isinstance(objective, BradleyTerry):
            return {REWARD_HEAD: {name: parameter.detach() for name, parameter in objective.head.named_parameters()}}
        return {} if self.critic is None else critic_files(self.critic)
