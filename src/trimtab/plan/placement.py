"""How a job lies on its devices: how many there are, what each holds only a part of, and over how many an engine's copy is cut.

Modes (`run.shard`), with S ranks that hold one set of parts together and N / S copies of it:

    none        every rank holds weights, gradients, masters and moments whole
    optimizer   masters and moments in S parts                            (ZeRO-1)
    gradients   these and the sums of gradients in S parts                (ZeRO-2)
    full        these and the weights in S parts, gathered layer by layer (ZeRO-3, FSDP2); masters are the weights' float32 parts

Adapters are small and stay whole on every rank; under them only `full` saves anything, of the frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Run, Shard
from trimtab.model.context import HYBRIDS
from trimtab.model.sizes import BLOCK
from trimtab.plan.job import Job, Machine
from trimtab.plan.rows import WHOLE_ROWS, RowRanks

SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
"""All modes, the simplest first."""
SHARDS_BUILT: tuple[Shard, ...] = ("none", "optimizer", "gradients", "full")
"""Modes that a run of this version can use; plans for other machines show all."""
PLACEMENTS_BUILT = ("colocated",)
"""Placements that a run of this version can use; plans for other machines show all."""
TENSOR_CUTS = (2, 4, 8)
"""Devices that an engine's copy may be cut over where it does not fit on one."""


@dataclass(frozen=True)
class Placement:
    """How a job is laid out over devices."""

    devices: int = 1
    hosts: int = 1
    shard: Shard = "none"
    shard_devices: int = 1
    """Ranks that hold one set of parts together."""
    tensor: int = 1
    """Devices that one rollout copy is cut over."""
    generates_only: bool = False
    """Its devices only generate: no weights but the engine's."""
    rows: RowRanks = WHOLE_ROWS
    """Ranks that share each micro-batch."""

    @property
    def state_parts(self) -> int:
        """Parts that masters and moments are in."""
        return 1 if self.shard == "none" else self.shard_devices

    @property
    def gradient_parts(self) -> int:
        return self.shard_devices if self.shard in ("gradients", "full") else 1

    @property
    def weight_parts(self) -> int:
        return self.shard_devices if self.shard == "full" else 1

    @property
    def copies(self) -> int:
        """Sets of parts, each on ranks of its own."""
        return self.devices // self.state_parts

    @property
    def per_host(self) -> int:
        return -(-self.devices // self.hosts)

    @property
    def engines(self) -> int:
        """Engines that generate at the same time."""
        return max(1, self.devices // self.tensor)

    @property
    def shares_weights(self) -> bool:
        """Rollout reads the trainer's own tensors."""
        return self.shard != "full" and self.tensor == 1


SINGLE_DEVICE = Placement()


def pinned_placement(run: Run, machine: Machine) -> Placement:
    """The placement that a run asks for; what it leaves open is all devices of the machine, with nothing in parts."""
    devices = machine.devices if run.devices == "auto" else run.devices
    shard: Shard = "none" if run.shard == "auto" or devices == 1 else run.shard
    group = min(devices, machine.per_host) if run.shard_devices == "auto" else run.shard_devices
    hosts = machine.on(devices).hosts
    rows = RowRanks(**row_ranks(run))
    return Placement(devices, hosts, shard, 1 if shard == "none" else group, _pinned_tensor(run), rows=rows)


def device_counts(run: Run, machine: Machine) -> list[int]:
    """Numbers of devices to try, most first: all of them, and below that those that divide a host evenly or are powers of two."""
    if run.devices != "auto":
        return [run.devices]
    if machine.cpu or machine.devices == 1:
        return [1]
    most, host = machine.devices, min(machine.devices, machine.per_host)
    inside = {n for n in range(1, host + 1) if host % n == 0 or n & (n - 1) == 0}
    whole_hosts = {hosts * host for hosts in range(1, most // host + 1) if hosts & (hosts - 1) == 0}
    counts = {most} | inside | whole_hosts
    least = 1 if run.shard in ("auto", "none") else 2
    group = 1 if run.shard_devices == "auto" else run.shard_devices
    parts = _pinned_tensor(run)
    alone = run.external  # vLLM takes devices behind the one of the run
    shared = lcm(*row_ranks(run).values())
    whole = (n for n in counts if n >= least and n % group == 0 and n % shared == 0)
    return sorted((n for n in whole if n % parts == 0 or (alone and n == 1)), reverse=True)


def may_share_rows(job: Job) -> bool:
    """Several ranks can have a part of each sequence."""
    return not any(shape is not None and shape.kind in HYBRIDS for shape in (job.shape, job.critic))


def row_cuts(devices: int) -> list[int]:
    """Numbers of ranks that may share a micro-batch, the fewest first."""
    return [n for n in range(2, devices + 1) if devices % n == 0]


def placements(
    run: Run, job: Job, machine: Machine, devices: int, tensor: int = 1, rows: RowRanks | None = None
) -> Iterator[Placement]:
    """Every placement on so many devices that a run leaves open, the simplest first. `rows`: where the run leaves that open."""
    rows = rows if rows is not None and run.sequence_parallel == "auto" else RowRanks(**row_ranks(run))
    hosts, tensor = machine.on(devices).hosts, max(tensor, _pinned_tensor(run))
    only = job.generates and not job.training and run.placement not in ("auto", "colocated")
    if devices == 1:
        yield Placement(tensor=tensor, generates_only=only)
        return
    for shard in _modes(run, job, machine):
        for group in _groups(run, shard, devices, min(devices, machine.per_host)):
            yield Placement(devices, hosts, shard, group, tensor, only, rows)


def _modes(run: Run, job: Job, machine: Machine) -> tuple[Shard, ...]:
    if run.shard != "auto":
        return (run.shard,)
    modes = SHARDS_BUILT if machine.here else SHARDS
    if not job.training:
        return ("none",) if job.generates else tuple(mode for mode in modes if mode in ("none", "full"))
    if job.rank:  # adapters are whole everywhere: nothing but frozen weights is worth cutting
        modes = tuple(mode for mode in modes if mode in ("none", "full"))
    if unblocked_row(job) is not None or job.quantised:
        modes = tuple(mode for mode in modes if mode != "full")
    if run.shard_devices not in ("auto", 1):
        modes = tuple(mode for mode in modes if mode != "none") or ("none",)
    return modes


def _groups(run: Run, shard: Shard, devices: int, host: int) -> list[int]:
    """Sizes of a set of parts. With `optimizer` and `gradients` all ranks of a host are best: whatever is not scattered inside a
    set is reduced between copies, and takes more memory. What is gathered in every micro-batch is gathered faster by fewer."""
    if shard == "none":
        return [1]
    if run.shard_devices != "auto":
        return [run.shard_devices]
    inside = [n for n in range(host, 1, -1) if host % n == 0] if shard == "full" else [host]
    across = [hosts * host for hosts in (2, 4, 8) if hosts * host < devices] if shard == "full" else []
    found = [n for n in (*inside, *across) if devices % n == 0]
    return found + ([devices] if devices not in found else [])


def _pinned_tensor(run: Run) -> int:
    return run.cut


def unblocked_row(job: Job) -> tuple[str, int] | None:
    """The name of a matrix whose rows are no whole blocks of 8-bit moments, and their length: `full` cuts between rows, and a
    block of moments has one scale. None: all are, or moments are not in 8 bits."""
    if not job.eight_bit or job.rank:
        return None
    shape = job.shape
    rows = {"model.embed_tokens.weight": shape.hidden}
    for block in shape.kinds:
        layer = f"model.layers.{shape.blocks.index(block)}"
        rows |= {f"{layer}.{name}.weight": sizes[0] for name, sizes in shape.linears(block).items()}
        rows |= {f"{layer}.mlp.experts.down_proj": block.width} if block.experts else {}
    return next(((name, size) for name, size in rows.items() if size % BLOCK), None)
