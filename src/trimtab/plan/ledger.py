"""Where memory goes: bytes of every phase of a step and of every component in it, on a device and on its host, before it runs.

States and the KV cache are exact arithmetic; activations are counted (activations.py). A phase has two sums: `allocated`, which
is what torch and the engine hand out and what their meters are compared with, and `device_bytes`, which adds what these meters do
not see: the CUDA context, graphs, and the room that an allocator leaves between tensors.

With several devices every phase is that of one rank: what it holds of the models is in states.py, and the host's sum counts all
ranks of a host. On a CPU ranks are processes of one host, and all of them together have to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trimtab.base.units import GIB, MIB
from trimtab.config.known import ResolvedRun
from trimtab.config.run import Run
from trimtab.model.sizes import (
    MAX_PIECE_ELEMENTS,
    MERGE_CHUNK_ELEMENTS,
    MOMENT_CHUNK_ELEMENTS,
    PIECES_ON_DEVICE,
    REWARD_ROW_TOKENS,
)
from trimtab.plan.activations import MicroBatchSize, UpdatePath, score_peak
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import STATES, carried_bytes, kv_cut
from trimtab.plan.placement import SINGLE_DEVICE, Placement
from trimtab.plan.quantised import dequantised_matrix, quantising
from trimtab.plan.reading import reading_bytes
from trimtab.plan.rows import row_here
from trimtab.plan.states import (
    FROZEN,
    buffer_bytes,
    critic_state,
    critic_trained,
    engine_weights,
    gathered_bytes,
    gradient_bytes,
    gradient_itemsize,
    largest_unit,
    moment_bytes,
    optimizer_bytes,
    policy_and_critic,
    reference_bytes,
    waiting_state_bytes,
)
from trimtab.plan.update_work import critic_path, rounding_bytes, update_work

# Measured on an H200 with driver 580 (docs/log.md): 619 MiB at the first tensor, 685 after the first product, and at most 823
# when all kernels of rollout and update are loaded and graphs of SmolLM2-135M and Qwen2.5-0.5B are captured.
CUDA_CONTEXT_BYTES = 690 * MIB
"""Device memory of the driver and its libraries."""
CUDA_GRAPHS_BYTES = 140 * MIB
"""Device memory of CUDA graphs and of loaded kernels."""
ASLEEP, AWAKE = CUDA_CONTEXT_BYTES + CUDA_GRAPHS_BYTES + 940 * MIB, 260 * MIB
"""What another library's process holds that has given its memory up, and how much more one that generates holds beside weights,
KV and work: vLLM 0.25 kept 1.41 GiB at 0.5B parameters and 1.69 at 7B, SGLang 0.5.17 1.34
(bench/results/engines-2026-11-16.md)."""
CUBLAS_WORKSPACES_BYTES = 2 * 32 * MIB
"""cuBLAS takes a workspace from torch's allocator for each stream, of which there are two: the update's, and the one that graphs
are captured on. 32 MiB each on Hopper, less on older devices."""
ALLOCATOR_SLACK_SHARE = 0.02
"""Room that the allocator leaves between tensors, as a share of the most that it handed out."""
CUDA_PROCESS_HOST_BYTES = 3 * GIB
"""Host memory of a process with torch and CUDA."""
CPU_PROCESS_HOST_BYTES = GIB
"""Host memory of a process with torch alone."""
REWARD_WORKER_HOST_BYTES = GIB // 4
"""Host memory of a reward worker."""
EMBEDDING_GRADIENT = "embedding gradient"
ENGINE = "engine's processes"
MERGED, MERGING = "merged copy", "merging adapters"
CHECKPOINT_COPY, MAX_COPY_SHARE = "checkpoint copy", 1 / 3
"""A checkpoint is copied before it is written if that takes at most this share of the host memory that states leave."""
VERSIONS = "kept versions"
NCCL = "NCCL"
NCCL_BYTES = 512 * MIB
"""Device memory that NCCL takes for a communicator. An estimate, between 0.3 and 1 GiB: to be measured."""
NOT_METERED = ("CUDA context", "CUDA graphs", "allocator slack", NCCL, ENGINE)
"""Components that the meters of torch and of the native engine do not see."""


@dataclass(frozen=True)
class Phase:
    """The fullest moment of a phase, on one device and on its host."""

    name: str
    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        return sum(value for name, value in self.device.items() if name not in NOT_METERED)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def required_bytes(self) -> int:
        """`device_bytes` without what rollout takes only where there is room for it twice."""
        if self.name != "rollout":
            return self.device_bytes
        return self.device_bytes - self.device.get(MERGED, 0) - self.device.get(MERGING, 0)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class Ledger:
    """All phases of a step, and what surrounds it."""

    phases: tuple[Phase, ...]

    def __getitem__(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def __contains__(self, name: str) -> bool:
        return any(phase.name == name for phase in self.phases)

    @property
    def fullest(self) -> Phase:
        """The fullest phase on the device, or on the host where there is no device."""
        return max(self.phases, key=lambda phase: (phase.required_bytes, phase.host_bytes))

    @property
    def fullest_host(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.host_bytes)

    @property
    def binding(self) -> str:
        """The largest component of the fullest phase, without what every plan has, such as the weights."""
        parts = self.fullest.device or self.fullest.host
        fixed = {"weights", "processes", *NOT_METERED} - {ENGINE}
        loose = {name: size for name, size in parts.items() if name not in fixed}
        return max(loose or parts, key=lambda name: parts[name])


def build_ledger(job: Job, machine: Machine, run: ResolvedRun, place: Placement = SINGLE_DEVICE) -> Ledger:
    """The ledger of a job whose `run` is known."""
    states = policy_and_critic(job, run, place)
    host = _host(job, machine, run, place)
    kept = (
        "weights", "adapters", "reference", "critic", "reward models", FROZEN, *([] if "weights" in states else ["masters"]),
    )  # fmt: skip
    loaded = {name: states[name] for name in kept if name in states}
    resident = {name: size for name, size in states.items() if name != "gradients"}
    loading = loaded | gathered_bytes(job, place) | quantising(job)
    phases, merged = [_phase("load", loading, host | reading_bytes(job, machine))], {}
    copy = _checkpoint_copy(job, machine, run, place) if job.training else {}
    host = host | copy
    if job.generates:
        rollout = _phase("rollout", resident | _rollout(job, machine, run, place) | _rewarding(job), host)
        merged = {} if run.external or not place.shares_weights else _merged_copy(rollout, job, machine)
        phases.append(replace(rollout, device=rollout.device | merged | (_merging(rollout, job) if merged else {})))
    if not job.training and not job.generates:
        path = update_path(job, run)
        phases.append(_phase("score", _scoring(job, run, place, resident, path), host))
    if job.training:
        stays = {} if run.rollout.lend_memory else merged
        phases += _training_phases(job, machine, run, place, states | stays, resident | stays, copy)
    if machine.cpu:
        return Ledger(tuple(_on_host(phase, machine.ranks_per_host) for phase in phases))
    nccl = _nccl(place)
    return Ledger(tuple(replace(phase, device=phase.device | nccl) for phase in phases))


def _nccl(place: Placement) -> dict[str, int]:
    """One communicator of all ranks, two more where several sets of parts are added up, and one for each size of a set of ranks
    that share micro-batches."""
    if place.devices == 1:
        return {}
    sharing = len({n for n in place.rows if n not in (1, place.devices)})
    return {NCCL: NCCL_BYTES * ((3 if place.copies > 1 and place.state_parts > 1 else 1) + sharing)}


def _training_phases(
    job: Job, machine: Machine, run: ResolvedRun, place: Placement, states: dict[str, int], resident: dict[str, int],
    copy: dict[str, int],
) -> list[Phase]:  # fmt: skip
    host, path, gathered = _host(job, machine, run, place) | copy, update_path(job, run), gathered_bytes(job, place)
    own = 0 if run.external else engine_weights(job, parts_of(run, place), False)  # another's is in `awake`
    copies = {"rollout weights": own} | gathered
    whole = {} if machine.cpu else {"staging": job.shape.parameters * job.itemsize}
    staging = {} if machine.cpu or copy else {"staging": _saved_weights(job) // machine.hosts}
    stays, awake = _stays(job, machine, run, place), _awake(job, machine, run, place)
    return [
        _phase("score", _scoring(job, run, place, resident, path) | stays, host),
        max(
            (
                _phase("update", resident | gathered | buffer_bytes(job, place) | work | stays, host)
                for work in (
                    {"gradients": states["gradients"]} | _updating(job, machine, run, path, place.rows.policy),
                    {"gradients": states["gradients"], EMBEDDING_GRADIENT: embedding_gradient(job, first=False)},
                    *_improving_critic(job, machine, run, path, place),
                )
            ),
            key=lambda phase: phase.device_bytes,
        ),
        _phase("optimizer", states | _stepping(job, run) | stays, host),
        _phase("publish", resident | ({} if place.shares_weights or not job.generates else copies) | awake, host),
        _phase("checkpoint", resident | gathered | awake, host | staging),
        _phase("export", resident | gathered | awake, host | whole),
    ]


def kept_versions_bytes(job: Job, place: Placement) -> int:
    """Host bytes of a rank for the last `staleness + 1` versions of what is trained: slow engines take them late, and the trainer
    does not wait."""
    one = job.adapters * 4 if job.rank else job.shape.parameters * job.itemsize
    return (job.staleness + 1) * -(-one // place.devices)


def update_path(job: Job, run: ResolvedRun) -> UpdatePath:
    return UpdatePath(
        job.itemsize, job.fused, run.checkpoint_activations, run.logprob_chunk, job.tiled_head, job.rank,
        away=run.offload.activations, liger=job.liger,
    )  # fmt: skip


def _rollout(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """The engine's memory while it generates."""
    found = _generating(job, machine, run, place)
    if run.external and not machine.cpu:
        return {ENGINE: _elsewhere(found) + processes_of(run) * (ASLEEP + AWAKE)}
    return found


def _generating(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """The same by component: KV cache, a decode step, a pass over prompts, and weights where they are not the trainer's."""
    rollout, shape, s = run.rollout, job.shape, job.itemsize
    batch = min(rollout.max_sequences, job.of_one_engine(place.engines))
    block = max(shape.kinds, key=lambda b: b.projected + 2 * b.used_width)
    entry = (
        4 * shape.vocabulary
        + (4 + 2 * s) * shape.hidden
        + s * (block.projected + block.attended + 3 * block.used_width)
    )
    mixed = max(s * b.pair_elements * shape.hidden + 24 * b.experts_used + 8 * b.experts for b in shape.kinds)
    entry += 4 * block.heads * (2 * (block.latent or block.value_size) + 4) + mixed
    prompts = -(-max(job.prompts, job.eval_sequences) // place.engines)
    prefill = min(rollout.prefill_tokens, prompts * job.typical_prompt)
    pass_ = (4 + 3 * s) * shape.hidden + s * (2 * block.projected + block.attended + 3 * block.used_width) + mixed
    pass_ += max((b.mixing.kept_bytes(s) for b in shape.kinds if b.mixing is not None), default=0)
    rows = batch * ((12 * job.longest_sequence if run.external else (16 + job.route_bytes) * job.new_tokens) + 512)
    copies, parts = processes_of(run), parts_of(run, place)
    apart = (run.external or not place.shares_weights) * copies * engine_weights(job, parts, run.external)
    words = 4 * shape.vocabulary * (3 if parts > 1 and not run.external else 1)  # every device draws from all, gathered
    return dequantised_matrix(job, machine.cpu) | {
        "rollout weights": apart,
        "KV cache": rollout.kv_memory // kv_cut(job, parts),
        STATES: carried_bytes(job, run),
        "decode step": batch * (words + (entry - words) // parts) + rows,
        "prefill": copies * prefill * pass_ // parts,
    }


def _rewarding(job: Job) -> dict[str, int]:
    """What the largest reward model needs for a full row of whole conversations. Reward models take turns, while the engine keeps
    its memory."""
    tokens = max(job.longest_sequence, min(REWARD_ROW_TOKENS, job.in_flight * job.longest_sequence))
    row = MicroBatchSize(tokens, max(1, tokens // job.longest_sequence), tokens, max(1, tokens // job.longest_sequence))
    path = UpdatePath(job.itemsize, False, False, 1, True)
    works = [sum(score_peak(shape, row, path).values()) for shape in job.reward_models]
    return {"reward models' work": max(works)} if works else {}


def _merged_copy(phase: Phase, job: Job, machine: Machine) -> dict[str, int]:
    """The engine merges adapters into a copy of the weights where there is room for two copies: decoding is then faster."""
    size = (job.shape.parameters - job.shape.table * (1 if job.shape.tied else 2)) * job.itemsize
    if job.shape.has_experts:  # adapters on these stay beside them
        kinds = job.shape.kinds.items()
        size = job.itemsize * sum(n * i * o for block, n in kinds for i, o in job.shape.linears(block).values())
    if not job.rank or job.quantised or machine.cpu or machine.device.memory - phase.device_bytes <= 2 * size:
        return {}
    return {MERGED: size}


def _merging(phase: Phase, job: Job) -> dict[str, int]:
    """What merging takes beyond what a pass over prompts or a reward model takes after it, in the same memory."""
    taken = phase.device.get("prefill", 0) + phase.device.get("reward models' work", 0)
    more = merging_bytes(job) - taken
    return {MERGING: more} if more > 0 else {}


def merging_bytes(job: Job) -> int:
    """Most bytes that exist while adapters are added to a copy of the weights, a piece at a time, in float32: the piece, what is
    added to it, and the rows of B times the scale that this is the product of."""
    pieces = [
        (inputs, min(outputs, max(1, MERGE_CHUNK_ELEMENTS // inputs)))
        for block in job.shape.kinds
        for inputs, outputs in job.shape.linears(block).values()
    ]
    return max(4 * rows * (2 * inputs + job.rank) for inputs, rows in pieces)


def _scoring(
    job: Job, run: ResolvedRun, place: Placement, resident: dict[str, int], path: UpdatePath
) -> dict[str, int]:
    if not (job.compared or job.old_logprobs or job.critic or job.frozen):
        return resident
    rows = place.rows
    fewest = min(rows.policy, rows.reference) if job.compared else rows.policy
    models = [(job.shape, fewest), (job.critic, rows.critic), *((shape, fewest) for shape in job.frozen)]
    work = max(
        (
            score_peak(shape, row_here(job, run.score_token_budget, ranks, place.devices), path)
            for shape, ranks in models
            if shape is not None
        ),
        key=lambda found: sum(found.values()),
    )
    visiting = {}
    if job.reference and run.offload.reference:
        visiting["reference"] = reference_bytes(job, place)
    return resident | visiting | gathered_bytes(job, place) | work | dequantised_matrix(job, cpu=run.device == "cpu")


def _updating(job: Job, machine: Machine, run: ResolvedRun, path: UpdatePath, sharing: int) -> dict[str, int]:
    """`sharing`: ranks that share each micro-batch."""
    rounding = {} if machine.cpu else {"rounding": rounding_bytes(job, path)}
    row = row_here(job, run.token_budget, sharing, machine.devices)
    return update_work(job, row, path) | rounding | dequantised_matrix(job, machine.cpu)


def embedding_gradient(job: Job, *, first: bool) -> int:
    """Bytes of the embedding's gradient as autograd makes it, the last of a backward pass, while the sums exist already. In a
    float32 model the first micro-batch's becomes the sum itself."""
    return 0 if job.rank or (first and job.itemsize >= 4) else job.itemsize * job.shape.table


def _improving_critic(
    job: Job, machine: Machine, run: ResolvedRun, path: UpdatePath, place: Placement
) -> list[dict[str, int]]:
    """A micro-batch of the critic, with its gradients in place of the policy's."""
    if job.critic is None:
        return []
    critic = replace(job, shape=job.critic)
    trained = {"gradients": gradient_bytes(job, critic_trained(job), place)}
    passing = gathered_bytes(critic, place) | buffer_bytes(critic, place)
    return [trained | passing | _updating(critic, machine, run, critic_path(path), place.rows.critic)]


def _stays(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """What the engine holds while others work. Processes that lend nothing also keep what prompts and decode steps needed."""
    if not job.generates:
        return {}
    lent, elsewhere = run.rollout.lend_memory, run.external and not machine.cpu
    if elsewhere:
        return {ENGINE: processes_of(run) * ASLEEP} if lent else _rollout(job, machine, run, place)
    return {} if lent else _held(job, machine, run, place)


def _awake(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """What an outside engine holds while it is idle but has its memory back: it does from new weights to the next rollout."""
    if not job.generates or not run.external:
        return {}
    if machine.cpu or not run.rollout.lend_memory:
        return _stays(job, machine, run, place)
    return {ENGINE: _elsewhere(_held(job, machine, run, place)) + processes_of(run) * ASLEEP}


def _held(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """What an engine holds between two rollouts if it lends nothing."""
    found = _generating(job, machine, run, place)
    return {name: found[name] for name in ("KV cache", STATES, "rollout weights")}


def _elsewhere(found: dict[str, int]) -> int:
    """Bytes of these components in other processes, with the slack of their allocators."""
    return sum(found.values()) + int(
        ALLOCATOR_SLACK_SHARE * sum(size for name, size in found.items() if name != "KV cache")
    )


def processes_of(run: Run) -> int:
    """Processes of an outside engine; 1 where the engine is the trainer's own."""
    return run.rollout.processes if run.external and run.rollout.processes != "auto" else 1


def parts_of(run: Run, place: Placement = SINGLE_DEVICE) -> int:
    """Devices that a rollout copy of the model is cut over; the trainer's device is counted as holding one part."""
    return max(place.tensor, run.cut)


def through_host(job: Job, run: Run, place: Placement = SINGLE_DEVICE) -> bool:
    """True where weights reach an outside engine through host memory: experts have other names in a checkpoint, in place only one
    device can be read, and weights that no device has whole are gathered layer by layer into one copy for all engines."""
    if place.generates_only:  # trainers on other devices send each part to its device
        return False
    return place.shard == "full" or job.shape.has_experts or parts_of(run) > 1


def _stepping(job: Job, run: ResolvedRun) -> dict[str, int]:
    found = {}
    if run.offload.optimizer:
        # Of a unit of the weight store: a layer, the embedding or the head; all adapters are one.
        largest = largest_unit(job.shape)
        piece, pieces = (
            (min(MAX_PIECE_ELEMENTS, job.trained), -(-job.trained // MAX_PIECE_ELEMENTS))
            if job.rank
            else (min(MAX_PIECE_ELEMENTS, largest), PIECES_ON_DEVICE)
        )
        found["pieces on the way"] = min(PIECES_ON_DEVICE, pieces) * (moment_bytes(job, piece) + 4 * piece)
    if job.eight_bit:
        found["moments in full"] = min(MOMENT_CHUNK_ELEMENTS, job.trained) * (3 * gradient_itemsize(job) + 4)
    return found


def _host(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """What the processes of one host hold all the time."""
    here = machine.ranks_per_host
    found = {"processes": here * (CPU_PROCESS_HOST_BYTES if machine.cpu else CUDA_PROCESS_HOST_BYTES)}
    found["processes"] += CPU_PROCESS_HOST_BYTES if place.devices > 1 else 0  # the driver, which has no device
    if job.generates:
        found["reward workers"] = run.reward_workers * REWARD_WORKER_HOST_BYTES
        if job.environment:
            found["environment workers"] = run.reward_workers * REWARD_WORKER_HOST_BYTES
    if run.external and job.generates:
        each = parts_of(run) + 1 if parts_of(run) > 1 else 1  # each part has a process beside the engine's
        each *= processes_of(run) * max(1, here // place.tensor)
        found[ENGINE] = each * (CPU_PROCESS_HOST_BYTES if machine.cpu else CUDA_PROCESS_HOST_BYTES)
        if machine.cpu or through_host(job, run, place):
            copies = 1 if place.shard == "full" else max(1, here // place.tensor)
            found["published weights"] = copies * job.shape.parameters * job.itemsize
    if run.offload.optimizer:
        found["optimizer state"] = here * waiting_state_bytes(job, place)
    if run.offload.reference and job.reference:
        found["reference"] = here * reference_bytes(job, place)
    if job.staleness and job.training and job.generates:
        found[VERSIONS] = kept_versions_bytes(job, place) * here
    if run.offload.activations:
        found["activations"] = here * run.token_budget * job.shape.layers * 4 * job.shape.hidden
    return found


def _checkpoint_copy(job: Job, machine: Machine, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """Host memory for a copy of a checkpoint, which is written while training goes on. Decided by states alone: sizes of batches
    follow from it, and must not decide it."""
    taken = sum(size for name, size in _host(job, machine, run, place).items() if name != "activations")
    taken += machine.ranks_per_host * sum(policy_and_critic(job, run, place).values()) if machine.cpu else 0
    critic = critic_trained(job) * (4 if job.rank else job.itemsize) + critic_state(job)
    size = (_saved_weights(job) + optimizer_bytes(job) + critic) // machine.hosts
    if not job.checkpoints or size > MAX_COPY_SHARE * (machine.host_memory - taken):
        return {}
    return {CHECKPOINT_COPY: size}


def _saved_weights(job: Job) -> int:
    """In bytes. Without a copy they are brought to the host; state passes through a buffer."""
    return job.adapters * 4 if job.rank else job.shape.parameters * job.itemsize


def _phase(name: str, device: dict[str, int], host: dict[str, int]) -> Phase:
    used = {key: value for key, value in device.items() if value}
    used["workspaces"] = CUBLAS_WORKSPACES_BYTES
    unseen = {"CUDA context": CUDA_CONTEXT_BYTES, "CUDA graphs": CUDA_GRAPHS_BYTES}
    unseen["allocator slack"] = int(
        ALLOCATOR_SLACK_SHARE * sum(value for key, value in used.items() if key not in ("KV cache", ENGINE))
    )
    return Phase(name, used | {key: value for key, value in unseen.items() if value}, host)


def _on_host(phase: Phase, ranks: int) -> Phase:
    """The phase on a machine without a device: all of it is host memory, of all ranks together."""
    seen = {key: ranks * value for key, value in phase.device.items() if key not in (*NOT_METERED, "workspaces")}
    both = {
        key: phase.host[key] + seen[key] for key in phase.host.keys() & seen.keys()
    }  # what waits, and what does not
    return replace(phase, device={}, host=phase.host | seen | both)
