"""What two ranks do for test_full.py: each writes what it found into a folder. `steps_alone`: the same steps in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.tiny import HYBRIDS, VOCABULARY, tiny_model, tiny_tokenizer
from trimtab.base.errors import ConfigError
from trimtab.cluster import mesh as meshes
from trimtab.cluster.mesh import Meeting, Mesh
from trimtab.config.sft import SftLearn
from trimtab.model.folder import other_files
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.record.checkpoint import RunState, load_optimizer
from trimtab.record.part import collect, write_part
from trimtab.record.saving import PendingCheckpoint
from trimtab.update.batch import Sample
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.shares import Cost, deal_samples
from trimtab.update.updater import Updater

CPU = torch.device("cpu")


class Case(NamedTuple):
    """A model, and how it is stepped."""

    name: str
    dtype: torch.dtype = torch.float32
    changes: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    prefetch: int = 1
    kind: str = "qwen2"


CASES = [
    Case("untied"),
    Case("tied", changes={"tie_word_embeddings": True}),
    Case("uneven", changes={"vocab_size": 91, "intermediate_size": 45, "num_hidden_layers": 2}),
    Case("half", torch.bfloat16, {"tie_word_embeddings": True}),
    Case("half_untied", torch.bfloat16),
    Case("recomputed", settings={"checkpoint_activations": True, "offload_optimizer": True}, prefetch=2),
    Case("states", changes=HYBRIDS["qwen3_next"], kind="qwen3_next"),
]


def samples(count: int = 7) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        tokens = torch.randint(3, VOCABULARY, (4 + index,), generator=generator)
        share = torch.full(tokens.shape, 1 / 49)
        found.append(Sample([5, 6, 7, 8 + index], tokens, torch.zeros(0), share, torch.zeros(0)))
    return found


def updater(policy: Policy, peers: Mesh | None = None, states: str = "full", **settings: Any) -> Updater:
    learn = SftLearn.model_validate({"max_grad_norm": 0.5, "optimizer": {"states": states, "eps": 1e-3}, "steps": 3})
    usual: dict[str, Any] = {"token_budget": 30, "score_token_budget": 30, "logprob_chunk": 7}
    usual |= {"checkpoint_activations": False, **settings, **({} if peers is None else {"peers": peers})}
    return Updater(policy, Likelihood(), learn, **usual)


def model_of(case: Case) -> Any:
    return tiny_model(case.kind, case.dtype, **case.changes)


class Ranked:
    """The updater of one of two ranks."""

    count, budget = 7, 30
    """Samples of a step, and tokens of a micro-batch."""

    def __init__(self, mesh: Mesh, model: Any, case: Case, **settings: Any) -> None:
        self.mesh, self.policy = mesh, ShardedPolicy(model, mesh.device_mesh, CPU, prefetch=case.prefetch)
        self.updater = updater(self.policy, mesh, **case.settings, **settings)

    def accumulate(self) -> None:
        objective = self.updater.objective
        shares = deal_samples(objective.together, samples(self.count), self.budget, 2, Cost(), equal=True)
        assert len(shares[0].batches) == len(shares[1].batches) > 1
        self.updater.accumulate_share(shares[self.mesh.rank])

    def step(self) -> float:
        self.accumulate()
        self.updater.prepare()
        return self.updater.apply(1e-2).grad_norm

    def gradient(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, one in self.policy.weights.sharded.items():
            if one.whole.requires_grad:
                found[name] = one.whole.grad.full_tensor()
        for name, parameter in self.policy.weights.parameters.items():
            if parameter.requires_grad and name not in found:
                found[name] = self.updater.optimizer.gradients.view(parameter).clone()
                self.mesh.sum(found[name])
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        named = dict(self.policy.model.named_parameters())
        return {name: self.policy.weights.whole(p).detach().clone() for name, p in named.items()}


def steps_alone(
    case: Case, count: int = 7, use: Callable[[Policy], None] = lambda policy: None, more: int = 2
) -> dict[str, Any]:
    """`use`: chooses how the policy computes. `more`: steps after the first."""
    policy = Policy(model_of(case))
    use(policy)
    alone = updater(policy, **case.settings)
    alone.accumulate(samples(count))
    gradient = {
        name: p.grad.clone() if grad is None else grad.clone()
        for (name, p), grad in zip(policy.weights.parameters.items(), alone.optimizer.grads())
    }
    norms = [alone.apply(1e-2).grad_norm, *(alone.step(samples(count), 1e-2).grad_norm for _ in range(more))]
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    return {"gradient": gradient, "norms": norms, "weights": weights}


def run_rank(rank: int, port: int, folder: Path) -> None:
    gc.freeze()  # what the test's process has left to be collected is not this one's to end
    torch.set_num_threads(1)
    meshes.START_TIMEOUT = meshes.STEP_TIMEOUT = timedelta(seconds=60)
    mesh = Mesh(Meeting(port, "full", rank, 2, "gloo", CPU), 2)
    for case in CASES:
        ranked = Ranked(mesh, model_of(case), case)
        ranked.accumulate()
        gradient = ranked.gradient()
        ranked.updater.prepare()
        norms = [ranked.updater.apply(1e-2).grad_norm, ranked.step(), ranked.step()]
        _save(folder / f"{case.name}.pt", rank, {"gradient": gradient, "norms": norms, "weights": ranked.weights()})
    half = CASES[3]
    ranked = Ranked(mesh, model_of(half), half)
    ranked.step()
    write_checkpoint(ranked, folder)
    ranked.step()
    _save(folder / "went_on.pt", rank, ranked.weights())
    _resume(mesh, folder, half, rank)
    del ranked
    gc.collect()  # whatever holds a group keeps the other rank waiting in it
    _break_off(mesh, folder, rank)
    try:
        Ranked(mesh, model_of(CASES[0]), CASES[0], states="8bit")
    except ConfigError as error:
        _save(folder / "refused.pt", rank, str(error))
    mesh.leave()


def write_checkpoint(ranked: Ranked, folder: Path) -> None:
    model, rank = ranked.policy.model, ranked.mesh.rank
    pending = PendingCheckpoint(folder, RunState(step=1), 1)
    if rank == 0:
        pending.open()
    dist.barrier()
    files = other_files(ranked.policy.skeleton, tiny_tokenizer()) if rank == 0 else {}
    part = collect(model, ranked.updater.optimizer, None, files, rank, 2)
    written: list[Any] = [None, None]
    dist.all_gather_object(written, write_part(folder / "checkpoints" / ".writing-step-1", part))
    if rank == 0:
        pending.finish(written)
    dist.barrier()


def _resume(mesh: Mesh, folder: Path, case: Case, rank: int) -> None:
    """Take a step from what one process has saved."""
    from transformers import AutoModelForCausalLM

    saved = folder / "alone" / "checkpoints" / "step-1"
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=case.dtype)
    ranked = Ranked(mesh, model, case)
    load_optimizer(saved, ranked.updater.optimizer)
    ranked.step()
    _save(folder / "resumed.pt", rank, ranked.weights())


def _break_off(mesh: Mesh, folder: Path, rank: int) -> None:
    """One rank fails in the middle of a pass, the other waits for it; both meet again and repeat the step."""
    ranked = Ranked(mesh, model_of(CASES[0]), CASES[0])
    layer = ranked.policy.body.layers[1]
    handle = layer.register_forward_hook(_fail) if rank == 1 else None
    failed = False
    try:
        ranked.accumulate()
    except (MemoryError, RuntimeError):
        failed = True
    if failed:
        ranked.policy.ungroup()
        mesh.abort()
    assert failed
    if handle is not None:
        handle.remove()
    mesh.rejoin()
    ranked.policy.regroup(mesh.device_mesh)
    ranked.updater.abandon()
    ranked.accumulate()
    _save(folder / "broken_off.pt", rank, ranked.gradient())
    ranked.updater.abandon()


def _fail(*_: Any) -> None:
    raise MemoryError("as a test wants it")


def _save(file: Path, rank: int, found: Any) -> None:
    if rank == 0:
        torch.save(found, file)
