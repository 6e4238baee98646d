"""What a plan depends on: the model, the work of a step, and the machine. Plain numbers; a job is made
by work.py, from a config alone or for a run that has loaded its model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.plan.activations import MicroBatchSize
from trimtab.plan.devices import Device
from trimtab.plan.shape import ModelShape


@dataclass(frozen=True)
class Machine:
    """Where the work runs."""

    device: Device
    devices: int = 1
    host_memory: int = 0
    """Bytes that are free on one host."""
    cores: int = 1
    cpu: bool = False
    """There is no device but the host: one memory for all."""
    per_host: int = 8
    """Devices of one host."""
    engines: tuple[str, ...] = ()
    """Other libraries that could generate here."""
    here: bool = False
    """It is this machine: a plan chooses only what this version can run."""

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.per_host)

    @property
    def ranks_per_host(self) -> int:
        return min(self.devices, self.per_host)

    @property
    def cores_per_rank(self) -> int:
        return max(1, self.cores // self.ranks_per_host)

    def on(self, devices: int) -> Machine:
        """The machine with so many of its devices. On a CPU all processes are on one host."""
        per_host = max(self.per_host, devices) if self.cpu else self.per_host
        return replace(self, devices=devices, per_host=per_host)


@dataclass(frozen=True)
class Correction:
    """What was measured of micro-batches (run/calibrate.py): one takes factor * counted + rest bytes."""

    factor: float = 1.0
    rest: int = 0
    launch_s: float | None = None
    """Seconds that this host needs to launch a layer's forward and backward passes; None: not measured."""


NO_CORRECTION = Correction()


@dataclass(frozen=True)
class Job:
    """The model and what a step does with it."""

    shape: ModelShape
    itemsize: int
    prompts: int
    samples: int
    longest_prompt: int
    """Tokens of the longest prompt that is accepted."""
    typical_prompt: int
    """Tokens of the longest prompt that was seen."""
    completion: int
    """Most new tokens of a sample."""
    eval_sequences: int = 0
    eval_completion: int = 0
    stored: str | None = None
    """How the checkpoint stores its weights, where they are dequantised on loading."""
    rank: int = 0
    """Rank of the adapters; 0: every parameter is trained."""
    base: str = "plain"
    """How frozen weights under adapters are stored: plain, fp8 or 4bit (`model.base`)."""
    adapters: int = 0
    """Parameters of the adapters."""
    kv_stored: str = "auto"
    """How the engine stores keys and values (`model.kv_dtype`)."""
    reference: bool = False
    """The reference policy has weights of its own."""
    critic: ModelShape | None = None
    """PPO's value model; None: there is none."""
    reward_models: tuple[ModelShape, ...] = ()
    """Reward models on the device; what they read is taken to be as long as what the policy reads."""
    frozen: tuple[ModelShape, ...] = ()
    """Models beside the first that only score, in parts where weights are: roles on devices that are not the actor's."""
    staleness: int = 0
    """Steps by which the policy that samples may lie behind the one that learns (`learn.staleness`)."""
    environment: bool = False
    """Completions are conversations with an environment, which has workers of its own."""
    eight_bit: bool = False
    """The optimizer's moments are kept in 8 bits."""
    compared: bool = False
    """Samples are scored by a reference policy: weights of its own, or the model without its adapters."""
    balanced: bool = False
    """Choices of experts are counted in a pass of their own before each update."""
    routed: bool = False
    """The engine keeps which experts it chose for every token (`learn.router_replay`)."""
    old_logprobs: bool = False
    """Old log-probs are computed before the update."""
    epochs: int = 1
    """Passes over a step's batch."""
    training: bool = True
    """False: the model is only measured."""
    generates: bool = True
    """There is a rollout."""
    checkpoints: bool = False
    """Checkpoints are written while it trains, and not only at its end."""
    fused: bool = True
    """The update runs through fused layers."""
    liger: bool = False
    """The update runs through the model's own modules with Liger's kernels."""
    tiled_head: bool = True
    """Log-probs come from kernels that store no logits."""
    steps: int | None = None
    """Steps of the run; None: not known."""
    lengths: tuple[float, ...] = ()
    """New tokens of a sequence at evenly spaced quantiles, where they are known; empty: all are as long as they may be."""

    correction: Correction = NO_CORRECTION

    @property
    def quantised(self) -> bool:
        """Weights of layers are stored in codes."""
        return self.base != "plain"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers; a head of codes has a byte of scale."""
        if self.kv_stored == "fp8":
            return self.shape.whole_kv_elements + 2 * sum(block.kv_heads for block in self.shape.blocks)
        if self.kv_stored == "bf16":
            return 2 * self.shape.whole_kv_elements
        return self.shape.kv_elements * self.itemsize

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def route_bytes(self) -> int:
        """Bytes of the choices that are kept for one token."""
        return 2 * sum(n * block.experts_used for block, n in self.shape.kinds.items()) if self.routed else 0

    @property
    def in_flight(self) -> int:
        """Most sequences generated in one go."""
        return max(self.sequences, self.eval_sequences)

    def of_one_engine(self, engines: int) -> int:
        """Most sequences that one of so many engines generates: groups are dealt whole."""
        groups = -(-self.prompts // engines) * self.samples
        return min(self.in_flight, max(groups, -(-self.eval_sequences // engines)))

    @property
    def new_tokens(self) -> int:
        return max(self.completion, self.eval_completion if self.eval_sequences else 0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that is generated, in training or evaluation."""
        return self.longest_prompt + self.new_tokens

    @property
    def longest_trained(self) -> int:
        """Tokens of the longest sequence that is trained on: a micro-batch has to hold it."""
        return self.longest_prompt + self.completion

    @property
    def typical_sequence(self) -> int:
        return self.typical_prompt + self.new_tokens

    @property
    def trained(self) -> int:
        if not self.training:
            return 0
        return self.adapters if self.rank else self.shape.parameters

    @property
    def expected_completion(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.lengths else float(self.completion)

    def still_running(self, token: float) -> float:
        """Share of a step's sequences that have not ended before that new token."""
        if not self.lengths:
            return float(token <= self.completion)
        return sum(length >= token for length in self.lengths) / len(self.lengths)

    def row(self, budget: int) -> MicroBatchSize:
        """A full micro-batch of this budget, in the mix of prompts and completions that takes the most memory: each sample of a
        group sees the whole prompt again."""
        whole = MicroBatchSize.of_groups(1, self.typical_prompt, self.samples, self.completion)
        if whole.tokens <= budget:
            return whole.times(budget / whole.tokens)
        samples = max(1, (budget - self.typical_prompt) // self.completion)
        part = MicroBatchSize.of_groups(1, self.typical_prompt, samples, self.completion)
        return part.times(budget / part.tokens)

    @property
    def step_row(self) -> MicroBatchSize:
        """All of a step as one row, completions as long as they may be."""
        return MicroBatchSize.of_groups(self.prompts, self.typical_prompt, self.samples, self.completion)

    @property
    def expected_row(self) -> MicroBatchSize:
        """The same with completions as long as expected: time is predicted for these lengths, memory never."""
        completion = max(1, round(self.expected_completion))
        return MicroBatchSize.of_groups(self.prompts, self.typical_prompt, self.samples, completion)
