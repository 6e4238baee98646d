"""Contradictions about devices and what each of them holds. Called by config/check.py."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import Contradiction, clash
from trimtab.config.learn import Learn
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Run
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig


def ranks(config: Config | SftConfig | RewardModelConfig, learn: Learn | None = None) -> Iterator[Contradiction]:
    """Parts that nobody shares, and sets of parts that do not add up to all devices."""
    run = config.run
    if run.tensor_parallel not in ("auto", 1):
        yield clash(
            "run.tensor_parallel",
            f"is {run.tensor_parallel}, but this version does not cut layers over devices where it trains",
            "Leave it out; run.shard: full holds weights in parts, run.sequence_parallel shares long sequences, and "
            "run.rollout.tensor_parallel cuts engines",
        )
    cut = run.shard not in ("auto", "none")
    if cut and run.devices == 1:
        yield clash(
            "run.shard run.devices",
            f"is {run.shard}, which has no effect on one device",
            "Leave it out, or set run.devices to more than 1",
        )
        return
    if run.overlap is True and run.devices == 1:
        yield clash(
            "run.overlap run.devices",
            "has no effect on one device, which has nothing to sum over ranks",
            "Leave it out, or set run.devices to more than 1",
        )
    if run.overlap is False and run.shard == "full":
        yield clash(
            "run.overlap run.shard",
            "has no effect: with run.shard: full gradients are always summed over ranks beside the backward pass",
            "Leave it out, or write run.shard: gradients",
        )
    yield from _shared_rows(config, learn)
    if run.shard_devices == "auto":
        return
    if run.shard == "none" and run.shard_devices > 1:
        yield clash(
            "run.shard_devices run.shard",
            "has no effect: with run.shard: none every rank holds everything",
            "Leave it out, or write run.shard: optimizer",
        )
    elif cut and run.shard_devices == 1:
        yield clash(
            "run.shard_devices run.shard",
            f"is 1, so nothing is in parts, but run.shard is {run.shard}",
            "Leave it out, or write run.shard: none",
        )
    elif run.devices != "auto" and run.devices % run.shard_devices:
        divisors = [str(n) for n in range(2, run.devices + 1) if run.devices % n == 0]
        yield clash(
            "run.shard_devices run.devices",
            f"is {run.shard_devices}, which does not divide the {run.devices} devices into equal sets",
            f"Write {' or '.join(divisors) or 'auto'}, or leave it out",
        )


def _shared_rows(config: Config | SftConfig | RewardModelConfig, learn: Learn | None) -> Iterator[Contradiction]:
    """Micro-batches that ranks cannot share."""
    run = config.run
    if isinstance(run.sequence_parallel, dict):
        absent = {
            "critic": learn is None or learn.advantage != "gae",
            "reference": learn is None or learn.kl.coef == 0,
        }
        for role in run.sequence_parallel:
            if absent.get(role):
                keys = "run.sequence_parallel learn.algorithm learn.kl.coef"
                yield clash(keys, f"names {role}, but this run has no {role}", f"Leave {role} out")
    for ranks in sorted(set(row_ranks(run).values()) - {1}):
        if run.devices == 1:
            what = f"is {ranks}, but run.devices is 1: one device has every micro-batch whole"
            fix = f"Write run.devices: {ranks}, or leave it out"
            yield clash("run.sequence_parallel run.devices", what, fix)
        elif run.devices != "auto" and run.devices % ranks:
            what = f"is {ranks}, which does not divide the {run.devices} devices into equal sets"
            fix = f"Write {nearest_divisor(ranks, run.devices)}, or run.devices: {max(1, round(run.devices / ranks)) * ranks}"
            yield clash("run.sequence_parallel run.devices", what, fix)


def cut_engine(run: Run) -> Iterator[Contradiction]:
    """An engine over several devices that cannot be."""
    devices = run.cut
    if run.engine == "sglang":
        yield clash(
            "run.rollout.tensor_parallel run.engine",
            f"an engine of {run.engine} runs on one device",
            "Write run.engine: native or vllm, or leave tensor_parallel out",
        )
    elif not run.external and run.devices == 1:
        yield clash(
            "run.rollout.tensor_parallel run.devices",
            f"is {devices}, but run.devices is 1: the native engine is cut over the run's own devices",
            f"Write run.devices: {devices} or a multiple, or run.engine: vllm",
        )
    elif run.external and run.rollout.processes not in ("auto", 1):
        yield clash(
            "run.rollout.tensor_parallel run.rollout.processes",
            f"splits one engine over {devices} devices, which leaves no device for other engine processes",
            "Leave one of the two out",
        )
    elif isinstance(run.placement, dict):
        return  # placement.py looks at the devices of rollout
    elif run.devices != "auto" and run.devices > 1 and run.devices % devices:
        whole = max(1, round(run.devices / devices)) * devices
        yield clash(
            "run.rollout.tensor_parallel run.devices",
            f"is {devices}, but {run.devices} devices cannot be divided into engines of {devices}",
            f"Write {nearest_divisor(devices, run.devices)}, or run.devices: {whole}",
        )


def nearest_divisor(asked: int, whole: int) -> int:
    """The number nearest to `asked` that divides `whole`; of two, the smaller."""
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: (abs(n - asked), n))
