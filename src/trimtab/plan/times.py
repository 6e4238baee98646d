"""How long a step takes: counted work over rates, phase by phase, plus what launching and waiting add.

Decode is a roofline summed over the shrinking batch of a step; prefill and update are products over a matrix rate that grows with
the model's width. The shares of a device's peaks are fitted to measurements on an H200 (tests/plan/test_times.py) and taken to be
the same elsewhere: good for comparing plans, not for promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from trimtab.config.known import ResolvedRun
from trimtab.config.run import Run
from trimtab.plan.balance import Deal, deal
from trimtab.plan.communication import NO_COMMUNICATION, Communication, Passes, communication
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import shared_kv_bytes
from trimtab.plan.ledger import parts_of, processes_of, through_host
from trimtab.plan.links import link_of
from trimtab.plan.placement import SINGLE_DEVICE, Placement
from trimtab.plan.quantised import weight_bytes
from trimtab.plan.shape import ModelShape
from trimtab.plan.states import reference_bytes, waiting_state_bytes

LAUNCH_LAYER_S = 2.6e-3
"""Seconds that the host needs to launch a layer's forward and backward passes: 2.5 and 2.8 ms on two hosts (docs/log.md)."""
FORWARD_SHARE_OF_LAUNCH = 0.35
"""Share of LAUNCH_LAYER_S that the forward pass takes."""
DECODE_LAYER_S = 16e-6
"""Seconds that a layer of a decode step takes beyond its bytes and products, in a graph."""
DECODE_STEP_S = 150e-6
"""Seconds that a decode step takes beyond its layers."""
UNFUSED_LAYER_EXTRA_S = 130e-6
"""Seconds that a layer takes longer through the model's own modules: with 0.5B parameters and 1,024 sequences a step took 7.2 ms
instead of 4.05 (docs/log.md)."""
EXPERTS_LAYER_S = 40e-6
"""Seconds that router and experts add to a layer of a decode step in a graph beside their bytes and products: some ten small
kernels (sorting tokens, where experts' tokens end, sums). Counted, not measured."""
EXPERTS_TILE = 128
"""Rows that a grouped product takes at a time: what an expert has less of is computed for nothing, half a tile on average."""
OUTSIDE_HOST = {"vllm": (1.2e-3, 28e-6), "sglang": (1.7e-3, 17e-6)}
"""Host seconds that an outside engine spends on a decode step, and on each sequence in it: between a slow host and a fast one,
where 512 sequences took vLLM 20 and 11 ms with any model (docs/log.md)."""
OUTSIDE_DEVICE, OUTSIDE_TURN = 0.4e-3, 1.6e-3
"""Device seconds that a step of an outside engine takes beyond the native engine's, alone and in turn with other processes: with
four and five processes of SmolLM2-135M, steps took 9.8 and 12 ms on H200s (docs/log.md)."""
OUTSIDE_START = {"vllm": 65.0, "sglang": 57.0}
"""Seconds until another library's engine is ready, on an H200: imports, kernels, graphs. Of several processes the first compiles
for the others, which then start together: five took about two minutes."""
OUTSIDE_PUBLISH = 0.15
"""Seconds that handing over a model's weights takes beyond their bytes: names, views, kernels."""
CPU_BANDWIDTH, CPU_FLOPS = 12e9, 50e9
"""Bytes and float32 operations a second of one core."""


STRETCHES = 24
"""Parts of equal length that a shrinking batch is summed over."""
# Shares of a device's peaks that are reached, fitted to measurements on an H200.
WIDE_SHARE = 0.62
"""Share of the matrix rate that products of wide layers reach."""
NARROW_SHARE, HALF_WIDTH = 0.892, 1030.0
"""Products of narrower layers reach NARROW_SHARE * hidden / (hidden + HALF_WIDTH) of it: a curve that fits what was measured."""
BANDWIDTH_SHARE = 0.80
DECODE_SHARE = 0.55
"""Share of the matrix rate that decode steps reach."""


def product_share(hidden: int) -> float:
    """Share of a device's matrix rate that products reach in a model of this hidden size."""
    return min(WIDE_SHARE, NARROW_SHARE * hidden / (hidden + HALF_WIDTH))


PHASES = ("rollout", "score", "update", "publish", "communication")
"""What the time of a step is the sum of."""


@dataclass(frozen=True)
class Times:
    """Seconds of a step's phases."""

    rollout: float
    score: float
    update: float
    publish: float
    start: float = 0.0
    """Seconds until another library's engine is ready, before the first step."""
    waits: Communication = NO_COMMUNICATION
    """Seconds in which devices wait for each other's bytes."""

    @property
    def communication(self) -> float:
        return self.waits.total

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PHASES)

    @property
    def longest(self) -> str:
        return max(PHASES, key=lambda name: getattr(self, name))

    def as_dict(self) -> dict[str, float]:
        phases = {name: getattr(self, name) for name in PHASES}
        return {name: round(value, 6) for name, value in (phases | {"total": self.total}).items()}


def launch_s(job: Job) -> float:
    """Seconds that the host takes to launch a layer's forward and backward passes: as measured here, or as on other hosts."""
    return LAUNCH_LAYER_S if job.correction.launch_s is None else job.correction.launch_s


def outside_step(
    job: Job, machine: Machine, run: Run, processes: int, batch: float, context: float, place: Placement = SINGLE_DEVICE
) -> float:
    """Seconds of a decode step of an outside engine: its processes take turns on the device, and each waits for its host."""
    step_s, sequence_s = OUTSIDE_HOST[run.engine]
    device_s = _Rates(job, machine, run, place).device_step(batch / processes, context)
    device_s += OUTSIDE_TURN if processes > 1 else OUTSIDE_DEVICE
    return max(processes * device_s, device_s + step_s + sequence_s * batch / processes)


def predict(job: Job, machine: Machine, run: ResolvedRun, place: Placement = SINGLE_DEVICE) -> Times:
    """Seconds of a step of a job whose `run` is known."""
    clock = _Clock(job, machine, run, place)
    return Times(clock.rollout(), clock.score(), clock.update(), clock.publish(), clock.start(), clock.communication())


def engine_clock(job: Job, machine: Machine, run: ResolvedRun, place: Placement = SINGLE_DEVICE) -> EngineClock:
    """How fast an engine of a plan is."""
    return _Clock(job, machine, run, place)


class EngineClock(Protocol):
    """How many sequences an engine decodes at once, and how long its passes take."""

    @property
    def rows(self) -> int: ...

    def step_s(self, batch: float, context: float) -> float: ...

    def prefill_s(self, tokens: float) -> float: ...


def prefill_tokens_per_step(job: Job, machine: Machine, run: ResolvedRun, place: Placement = SINGLE_DEVICE) -> float:
    """Prompt tokens that an engine prefills in the time of a decode step of a full batch."""
    clock = _Clock(job, machine, run, place)
    batch = min(run.rollout.max_sequences, job.of_one_engine(place.engines))
    step_s = clock._decode_step(batch, job.typical_prompt + job.expected_completion / 2)
    return step_s * clock.flops * parts_of(run, place) / (2 * job.shape.active_parameters)


@dataclass(frozen=True)
class _Rates:
    """What does not depend on the sizes of a plan."""

    job: Job
    machine: Machine
    run: Run
    place: Placement

    @property
    def _cores(self) -> float:
        """Cores of each rank of a CPU."""
        return self.machine.cores / self.machine.ranks_per_host

    @property
    def flops(self) -> float:
        """Operations a second that products reach on one device."""
        if self.machine.cpu:
            return self._cores * CPU_FLOPS
        return self.machine.device.flops * product_share(self.job.shape.hidden)

    @property
    def bandwidth(self) -> float:
        if self.machine.cpu:
            return self._cores * CPU_BANDWIDTH
        return self.machine.device.bandwidth * BANDWIDTH_SHARE

    def device_step(self, batch: float, context: float) -> float:
        job, shape, cut = self.job, self.job.shape, parts_of(self.run, self.place)
        used = max(1.0, batch)
        read = (weight_bytes(job) if job.quantised else shape.parameters_read(used) * job.itemsize) / cut
        keys = batch * context * job.kv_token_bytes / cut
        keys += 2 * batch * shape.state_bytes(job.itemsize) / cut  # read and written
        logits = 8 * batch * shape.vocabulary / cut
        rate = self._cores * CPU_FLOPS if self.machine.cpu else self.machine.device.flops * DECODE_SHARE
        products = 2 * batch * shape.active_parameters / cut / rate
        fixed = 2e-3 if self.machine.cpu else DECODE_STEP_S + shape.layers * (DECODE_LAYER_S + self._own_layer)
        exchange = 0.0
        if cut > 1:
            moved = batch * shape.hidden * job.itemsize
            exchange = shape.layers * 2 * (10e-6 + moved / link_of(self.machine)[0])
            exchange += 0.0 if self.run.external else 4 * batch * shape.vocabulary / link_of(self.machine)[0]
        return fixed + max(read / self.bandwidth, products) + (keys + logits) / self.bandwidth + exchange

    @property
    def _own_layer(self) -> float:
        """Seconds that a layer of the native engine takes longer: for router and experts, and for the model's own modules."""
        job = self.job
        if self.run.external:
            return 0.0
        mixed = EXPERTS_LAYER_S * sum(n for b, n in job.shape.kinds.items() if b.experts) / job.shape.layers
        return mixed + (0.0 if job.fused else UNFUSED_LAYER_EXTRA_S)


@dataclass(frozen=True)
class _Clock(_Rates):
    run: ResolvedRun

    def start(self) -> float:
        if not self.run.external or not self.job.generates:
            return 0.0
        return OUTSIDE_START[self.run.engine] * (2 if processes_of(self.run) > 1 else 1)

    def rollout(self) -> float:
        job = self.job
        if not job.generates:
            return 0.0
        mine, slots = self._mine, self.rows
        # Slots that become free are filled while sequences wait; then the batch shrinks.
        full = self._decode_step(slots, job.typical_prompt + job.expected_completion / 2)
        refilled = (mine - slots) / slots * job.expected_completion * full
        return refilled + self._last_batch(slots) + self._prefill(mine)

    @property
    def _mine(self) -> int:
        """Sequences of the busiest engine."""
        job = self.job
        return min(job.sequences, -(-job.prompts // self.place.engines) * job.samples)

    @property
    def rows(self) -> int:
        """Sequences that an engine decodes at once."""
        job, rollout, mine = self.job, self.run.rollout, self._mine
        tokens = round(job.expected_completion)
        one = shared_kv_bytes(job, self.run, mine, job.samples, tokens, rollout.page_tokens) / mine
        return max(1, min(mine, rollout.max_sequences, int(rollout.kv_memory / max(1.0, one))))

    def step_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step of an engine."""
        return self._decode_step(batch, context)

    def prefill_s(self, tokens: float) -> float:
        """Seconds of the passes of an engine over so many tokens of prompts."""
        products = 2 * self.job.shape.active_parameters * tokens / parts_of(self.run, self.place) / self.flops
        passes = -(-tokens // self.run.rollout.prefill_tokens)
        return max(products, passes * self.device_step(1, self.job.typical_prompt))

    def _last_batch(self, batch: int) -> float:
        """Seconds of the decode steps from when all slots are full for the last time, summed over stretches of equal length: the
        batch shrinks as sequences end."""
        longest = max(self.job.lengths) if self.job.lengths else float(self.job.completion)
        total = 0.0
        for index in range(STRETCHES):
            token = (index + 0.5) / STRETCHES * longest
            alive = batch * self.job.still_running(token)
            if alive > 0:
                total += longest / STRETCHES * self._decode_step(max(1.0, alive), self.job.typical_prompt + token)
        return total

    def _decode_step(self, batch: float, context: float) -> float:
        if not self.run.external or self.machine.cpu:
            return self.device_step(batch, context)
        processes = self.run.rollout.processes
        return outside_step(self.job, self.machine, self.run, processes, batch, context, self.place)

    def _prefill(self, sequences: int) -> float:
        """Seconds of the passes over prompts: each takes at least as long as a decode step, which reads the weights too."""
        tokens = sequences / self.job.samples * self.job.typical_prompt
        return self.prefill_s(tokens) + 0.01

    def score(self) -> float:
        frozen = sum(self._frozen_pass(shape) for shape in (*self.job.frozen, *self.job.reward_models))
        if not self._scorings:
            return frozen
        moved = frozen
        if self.job.reference and self.run.offload.reference:
            moved = reference_bytes(self.job, self.place) / self.machine.device.host_link
        return self._scorings * self._one_scoring().total + moved

    def _frozen_pass(self, shape: ModelShape) -> float:
        """Seconds of a model beside the first that reads every conversation of the step once."""
        job = self.job
        tokens = job.sequences * (job.typical_prompt + job.expected_completion) / self.machine.devices
        mine = replace(self, job=replace(job, shape=shape))
        return 2 * shape.active_parameters * tokens / mine.flops

    @property
    def _scorings(self) -> int:
        """Passes over the batch without gradients."""
        return int(self.job.compared) + int(self.job.old_logprobs) + int(self.job.critic is not None)

    def _one_scoring(self) -> Passes:
        return self._passes(self.run.score_token_budget, 2.0, FORWARD_SHARE_OF_LAUNCH * launch_s(self.job))

    def update(self) -> float:
        """Forward and backward passes, and the optimizer step."""
        run, job = self.run, self.job
        if not job.training:
            return 0.0
        seconds = self._one_update().total
        if run.offload.activations:
            tokens = job.expected_row.tokens / self.machine.devices
            moved = 2 * tokens * job.shape.layers * 4 * job.shape.hidden / self.machine.device.host_link
            seconds = max(seconds, moved)
        once = job.epochs * seconds + self._optimizer_step()
        if job.critic is None:
            return once
        return once * (1 + job.critic.parameters / job.shape.parameters)  # a critic is trained as the policy is

    def _one_update(self) -> Passes:
        run, job = self.run, self.job
        factor = (4.0 if job.rank else 6.0) + (2.0 if job.balanced else 0.0)
        if run.checkpoint_activations is True:
            factor += 2.0
        elif run.checkpoint_activations == "some":
            factor += 2.0 * self._gate_up_share()
        if not job.fused and not self.machine.cpu:
            factor *= 1.35  # the model's own modules: 1.3 to 1.8 (docs/log.md)
        return self._passes(run.token_budget, factor, launch_s(job))

    def communication(self) -> Communication:
        if self.place.devices == 1:
            return NO_COMMUNICATION
        scoring = self._one_scoring()
        return communication(
            self.job,
            self.machine,
            self.place,
            self._one_update(),
            Passes(self._scorings * scoring.count, scoring.seconds),
            self.run.overlap,
            self.run.checkpoint_activations is True,
        )

    def _gate_up_share(self) -> float:
        shape = self.job.shape
        products = sum(n * 2 * shape.hidden * b.used_width for b, n in shape.kinds.items())
        return products / shape.active_parameters

    def _passes(self, budget: int, factor: float, launch: float) -> Passes:
        """A step's tokens on their way through the model in micro-batches, of the rank that has the most."""
        job, shape = self.job, self.job.shape
        row, dealt = job.expected_row, self._dealt(budget)
        tokens, count = row.tokens / self.machine.devices * dealt.imbalance, dealt.micro_batches
        length = job.typical_prompt + job.expected_completion
        attention = factor * sum(
            n * b.heads * b.head_size * min(length, b.window or length) for b, n in shape.kinds.items()
        )
        attention += factor * sum(n * b.mixing.operations for b, n in shape.kinds.items() if b.mixing is not None)
        body = shape.active_parameters - shape.table
        head = shape.table * row.predicted / row.tokens
        work = tokens * (factor * (body + head) + attention)
        seconds = work / self.flops + factor / 2 * self._laying_out(tokens, count)
        return Passes(count, seconds / count if self.machine.cpu else max(seconds / count, shape.layers * launch))

    def _laying_out(self, tokens: float, count: int) -> float:
        """Seconds of a forward pass in which tokens are laid out for their experts, and what these made is added up; and of the
        tiles that experts do not fill."""
        job, shape = self.job, self.job.shape
        moved, empty = 0.0, 0.0
        for block, layers in shape.kinds.items():
            if block.experts:
                moved += layers * tokens * block.experts_used * job.itemsize * (4 * shape.hidden + 6 * block.width)
                rows = min(count * block.experts * EXPERTS_TILE / 2, tokens * block.experts_used)
                empty += layers * rows * 6 * shape.hidden * block.width
        return moved / self.bandwidth + (0.0 if self.machine.cpu else empty / self.flops)

    def _dealt(self, budget: int) -> Deal:
        sharing = self.place.rows.policy
        if self.machine.devices == sharing:
            budget *= sharing
            return Deal(1.0, max(1, -(-self.job.expected_row.tokens // budget)))
        return deal(self.job, self.machine.devices // sharing, budget * sharing)

    def _optimizer_step(self) -> float:
        job = self.job
        trained = job.trained if job.rank else job.trained / self.place.state_parts
        if self.run.offload.optimizer:
            return 2 * waiting_state_bytes(replace(job, critic=None), self.place) / self.machine.device.host_link
        # 8-bit moments are read, widened, divided, looked up and written again by a kernel each: counted, not measured.
        return (130 if job.eight_bit else 30) * trained / self.bandwidth

    def publish(self) -> float:
        """Seconds to give another library's engine its copy of the weights. The native one reads the trainer's own; under `full`
        they are gathered for it, which is communication."""
        if self.run.external and not self.machine.cpu:
            rate = self.machine.device.host_link if through_host(self.job, self.run, self.place) else self.bandwidth
            return 2 * self.job.shape.parameters * self.job.itemsize / rate + OUTSIDE_PUBLISH
        return 0.0
