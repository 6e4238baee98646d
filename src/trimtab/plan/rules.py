"""The preferred value of each key of `run`, with a short reason. Whether it fits is decided in sizes.py."""

from __future__ import annotations

from trimtab.config.run import Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import least_kv_bytes
from trimtab.plan.ledger import MIB
from trimtab.plan.placement import Placement
from trimtab.plan.rows import WHOLE_ROWS, RowRanks, least_budget
from trimtab.plan.times import launch_s, outside_step, product_share

GRAIN_TOKENS = 128
"""Budgets are multiples of this many tokens."""
MAX_ENGINE_PROCESSES = 6
"""Most processes of an outside engine: each takes its turn on the device, and has its own kernels and graphs there."""
MAX_SLOWDOWN_WITH_FEWER_PROCESSES = 1.1
"""The fewest processes are chosen whose predicted decode step is at most this many times as long as the shortest."""
MAX_USEFUL_BUDGET_TOKENS = 65536
"""Tokens of the largest micro-batch that is of use."""
MIN_PAGE_TOKENS = 16
"""Tokens of the smallest KV page that is tried: smaller ones save next to nothing."""


def why_kernels(job: Job, machine: Machine) -> str:
    if job.fused:
        return "fused layers support this model"
    return "fused layers need a GPU" if machine.cpu else "fused layers do not support this model or dtype"


def why_placed(place: Placement, machine: Machine) -> dict[str, str]:
    """Reasons for a placement that was the only one; where there are several, place.py says why it is this one."""
    one = "on a CPU one process uses all cores" if machine.cpu else "there is one device"
    if place.devices == 1:
        whole = "one device holds everything"
        return {"devices": one, "shard": whole, "shard_devices": whole}
    group = "all ranks of a host" if place.shard_devices == machine.ranks_per_host else "the fastest that fits"
    group = "every rank holds everything" if place.shard == "none" else group
    return {"devices": "all that there are", "shard": "every rank holds everything", "shard_devices": group}


def overlaps(place: Placement, job: Job) -> bool:
    """Gradients are summed over ranks beside the backward pass; those of adapters are few, and are summed at once."""
    return place.devices > 1 and not job.rank


def why_overlap(place: Placement, job: Job) -> str:
    if place.devices == 1:
        return "nothing is summed over ranks"
    return "adapters are summed at once" if job.rank else "a layer is summed over ranks while the next is computed"


def why_cut(place: Placement) -> str:
    if place.tensor > 1:
        return f"the model is split over {place.tensor} devices"
    return "there is one device" if place.devices == 1 else "an engine on each device"


def workers_for(cores: int) -> int:
    """Processes that run reward functions."""
    return max(1, min(8, cores))


def best_chunk(job: Job, machine: Machine, room: int) -> tuple[int, str]:
    """How many tokens' logits, or their gradients, exist at a time: on a GPU whole tiles, enough for a product at full speed."""
    if machine.cpu:
        return max(64, min(4096, 64 * MIB // (12 * job.shape.vocabulary))), "keeps the logits of a chunk small"
    most, logit = min(1024 * MIB, room // 32), 4 if job.tiled_head else 14
    return max(128, min(8192, most // (logit * job.shape.vocabulary) // 128 * 128)), "keeps the logits of a chunk small"


def page_tokens(run: Run, job: Job, machine: Machine) -> tuple[int, str]:
    """Tokens of a KV page. On a CPU, where attention has no paged kernel, a page that holds a whole sequence saves copying the
    cache in every step."""
    if run.rollout.page_tokens != "auto":
        return run.rollout.page_tokens, ""
    if run.external:
        return (128 if machine.cpu else 16), "the engine's usual page size"
    if not machine.cpu:
        return 64, "one tile of the decode kernel"
    whole = job.in_flight * job.typical_sequence * job.kv_token_bytes
    roomy = run.rollout.kv_memory == "auto" and job.longest_sequence == job.typical_sequence
    if roomy and 2 * whole <= machine.host_memory // 2:
        return job.typical_sequence, "one page per sequence: decoding reads it in place"
    return 16, "wastes little at the end of a sequence"


def small_page(run: Run, machine: Machine) -> int:
    """Tokens of the smallest page that may be chosen. vLLM's CPU engine has pages of 32 tokens or a multiple."""
    return 2 * MIN_PAGE_TOKENS if run.engine == "vllm" and machine.cpu else MIN_PAGE_TOKENS


def best_processes(run: Run, job: Job, machine: Machine) -> tuple[int, str]:
    """How many processes an outside engine has: while one is busy on its host, another has the device. The fewest that come near
    the fastest. Each has a copy of the weights; all copies together take at most a quarter of the device."""
    if run.rollout.processes != "auto":
        return run.rollout.processes, ""
    if not run.external or machine.cpu:
        return 1, "one process uses all cores" if run.external else "the engine runs in the trainer's process"
    if run.cut > 1:
        return 1, f"one process uses {run.cut} devices"
    room = machine.device.memory // 4 // (job.shape.parameters * job.itemsize)
    most = max(1, min(MAX_ENGINE_PROCESSES, machine.cores_per_rank // 3, room))
    if run.rollout.kv_memory != "auto":  # each has to hold the longest sequence
        page = page_tokens(run, job, machine)[0]
        most = max(1, min(most, run.rollout.kv_memory // least_kv_bytes(job, run, 1, page)))
    context = job.typical_prompt + job.expected_completion / 2
    seconds = {n: outside_step(job, machine, run, n, job.in_flight, context) for n in range(1, most + 1)}
    count = min(n for n in seconds if seconds[n] <= MAX_SLOWDOWN_WITH_FEWER_PROCESSES * min(seconds.values()))
    return count, "a single process would leave the GPU idle" if count > 1 else "more processes gain nothing"


def lends(run: Run, machine: Machine) -> tuple[bool, str]:
    """Whether rollout lends its memory to the update: they need it in turn, and handing it over takes milliseconds."""
    if run.rollout.lend_memory != "auto":
        return run.rollout.lend_memory, ""
    if machine.cpu:
        return False, "on a CPU everything is in host memory"
    if not machine.device.lends:
        return False, "this device cannot lend memory"
    return True, "rollout and update take turns with the same memory"


def most_at_once(job: Job, machine: Machine, engines: int) -> int:
    """Sequences that one of so many engines decodes at once, beyond which a decode step gains nothing."""
    return min(job.of_one_engine(engines), 256 if machine.cpu else 1024)


def most_prefilled(machine: Machine) -> int:
    """Tokens of one prefill pass that keep a device busy."""
    return 4096 if machine.cpu else 16384


def useful_budget(job: Job, machine: Machine, fill: bool, rows: RowRanks = WHOLE_ROWS) -> tuple[int, str]:
    """Tokens of a micro-batch beyond which the update gets no faster. On a GPU a micro-batch has to take longer than its kernels
    take to launch; and gradients are added up once a micro-batch, which by their bytes takes 1.5 % of its time at 16k tokens."""
    whole = max(
        least_budget(job, rows),
        -(-job.step_row.tokens // machine.devices // GRAIN_TOKENS) * GRAIN_TOKENS,
    )
    if machine.cpu:
        return 4096, "larger micro-batches gain nothing"
    if fill:
        return whole, "the whole step in one micro-batch"
    flops = machine.device.flops * product_share(job.shape.hidden)
    launched = launch_s(job) * job.shape.layers * flops / (6 * job.shape.active_parameters)
    return min(
        MAX_USEFUL_BUDGET_TOKENS, max(16384, 1 << round(launched).bit_length())
    ), "larger micro-batches gain nothing"


def why_away(key: str, away: bool, job: Job, machine: Machine) -> str:
    if machine.cpu:
        return "on a CPU everything is in host memory"
    if key == "reference" and not job.reference:
        return "there is no reference model"
    if key == "activations" and not away:
        return "they fit on the device"
    return "the memory it frees makes a step faster" if away else "it fits on the device"
