"""`run`: how the work is done. No key here changes what is learned: for every key the gradient of a step is the same for
every value, up to float reordering (tests/invariants/test_gradient_invariance.py walks this schema and fails on a key
without a case). All keys are `auto` by default and any of them can be pinned."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StrictInt, model_validator

from trimtab.base.units import BYTES_IN
from trimtab.config.base import Auto, PositiveInt, Section


def parse_bytes(value: object) -> object:
    """Accept 2147483648, "2GiB" or "2.5 GB"."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value)
    unit = BYTES_IN.get((match.group(2) or "B").upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a unit, such as 2GiB or 512MiB")
    return int(float(match.group(1)) * unit)


Bytes = Annotated[int, Field(gt=0), BeforeValidator(parse_bytes)]


class Rollout(Section):
    """The generation phase."""

    max_sequences: PositiveInt | Auto = "auto"
    """Most sequences decoded at once. auto: all of a step, at most 1,024 on a GPU and 256 on a CPU."""
    kv_memory: Bytes | Auto = Field(default="auto", union_mode="left_to_right")
    """Bytes for the KV cache, such as 4GiB. auto: enough for the whole step where memory allows."""
    prefill_tokens: PositiveInt | Auto = "auto"
    """Most prompt tokens in one forward pass; longer prompts are prefilled in chunks."""
    page_tokens: PositiveInt | Auto = "auto"
    """Tokens in one KV page."""
    prefix_cache: bool = True
    """Keep the KV of common prompt beginnings for later prompts of the same policy version."""
    lend_memory: bool | Auto = "auto"
    """Give the memory of the KV cache to the update and take it back for the next rollout. auto: where the device
    can do that."""
    python: str | None = None
    """Interpreter of the environment that holds vLLM or SGLang, such as ~/vllm/bin/python: its packages need not agree with this
    one's. None: this one's."""
    eager: bool | None = None
    """Run vLLM or SGLang without compilation and CUDA graphs: it starts faster and decodes more slowly. None: only on a CPU."""
    processes: PositiveInt | Auto = "auto"
    """Processes of vLLM or SGLang in each engine, which share out its sequences; each has a copy of the weights. With several
    devices each has an engine, so N devices have N times as many. auto: several where one would be bound by its host, as it is
    with small models on a GPU; 1 with tensor_parallel."""
    tensor_parallel: PositiveInt | Auto = "auto"
    """Devices that an engine's copy of the model is cut over, of the native engine or vLLM: decoding a large model waits for its
    weights to be read, and each then reads a part. It has to divide the devices: there are devices / tensor_parallel engines.
    The ranks of a native engine generate together; a vLLM engine is owned by the first rank of its set, while the others lend
    their memory. With devices: 1, vLLM takes the trainer's device and those behind it. auto: 1, or more where a copy does not fit
    on one."""


class Offload(Section):
    """What is kept in host memory while the device does not need it."""

    optimizer: bool | Auto = "auto"
    """Masters and moments, streamed through the device in each optimizer step. auto: where they would leave too little room."""
    reference: bool | Auto = "auto"
    """The reference policy's weights, on the device only while it scores. auto: where memory is short."""
    activations: bool | Auto = "auto"
    """What layers keep for the backward pass; needs checkpoint_activations: true. auto: where the longest sequence would not fit
    otherwise."""


Kernels = Literal["auto", "native", "liger", "plain"]
Shard = Literal["none", "optimizer", "gradients", "full"]
RowRole = Literal["policy", "reference", "critic"]
"""Models that pass over the samples of a step."""
Recompute = bool | Literal["some"]
"""What of the activations the backward pass makes again: nothing, some of it, or all but each layer's input."""


class Run(Section):
    """How to run it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives. auto: the first CUDA device, or the CPU."""
    devices: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Devices to train and generate on. Each has a process of its own, called a rank. auto: as many of the visible GPUs as make a
    step fastest; 1 on a CPU, where a number starts that many processes."""
    cluster: str | Auto = "auto"
    """Where the devices are. local: this machine. An address, such as 10.0.0.1:6379: the Ray cluster whose head is there, on any
    of whose nodes the run may be started (docs/cluster.md); devices then counts those of all nodes, by default all GPUs or,
    without any, a process a node. auto: the cluster that RAY_ADDRESS names, as it does in a Ray job, or else this machine."""
    wait_for_hosts: Annotated[float, Field(ge=0)] = 60.0
    """Seconds for which a run on a Ray cluster that has lost a host waits for as many devices as before. Then it is planned anew
    for those that are left. Either way it goes on from its newest checkpoint."""
    shard: Shard | Auto = "auto"
    """What each rank holds only its part of. none: nothing, every rank holds everything. optimizer: master weights and optimizer
    state (ZeRO-1). gradients: these and gradients (ZeRO-2). full: these and the weights, which are gathered layer by layer
    (ZeRO-3, FSDP2). auto: the fastest that fits."""
    shard_devices: PositiveInt | Auto = "auto"
    """Ranks that hold one set of parts together; the next ranks hold a copy of it. auto: all ranks of a host."""
    prefetch: PositiveInt | Auto = "auto"
    """Layers whose weights are gathered while the ones before them are computed, with shard: full. Each takes the memory of a
    layer. auto: 1."""
    sequence_parallel: Annotated[int, Field(ge=1, le=1024)] | Auto | dict[RowRole, PositiveInt] = "auto"
    """Devices that share each micro-batch of the update, each with a part of its tokens, for sequences that one cannot hold; the
    number has to divide devices. token_budget then counts the tokens on each device. A mapping gives each model its own number:
    {policy: 4, reference: 2, critic: 4}; one that is left out has the policy's. auto: 1, unless the
    longest sequence does not fit or fills a micro-batch alone; then what is fastest."""
    tensor_parallel: PositiveInt | Auto = "auto"
    """Devices that share each layer of the models that are trained. This version serves 1: a model that one device cannot hold is
    trained with shard: full, and its sequences with sequence_parallel. Engines have rollout.tensor_parallel."""
    overlap: bool | Auto = "auto"
    """Sum gradients over ranks while the backward pass still runs, layer by layer as they are done, instead of after it. Costs no
    memory. With shard: full it is always so. auto: true on several devices, unless only adapters are trained, which are summed at
    once."""
    placement: Literal["auto", "colocated", "split"] | dict[str, StrictInt | str] = "auto"
    """Which devices do what. colocated: all do everything, in turn. split: some train and others generate. A mapping pins it:
    each role (actor, critic, reference, reward, rollout) has a number of devices, or a role to share with:
    {actor: 16, critic: 16, reference: actor, reward: critic, rollout: 16}. A role left out is on the actor's devices. auto: the
    fastest that this version can run."""
    profile: Literal["safe", "balanced", "max"] = "balanced"
    """How much of the memory a plan may fill: 80, 90 or 96 %. max also makes micro-batches as large as fit, where the others stop
    at what makes a step faster."""
    memory: Bytes | None = None
    """Most memory that the run may take of the device, such as 40GiB, the driver's own part included; of the host, on a CPU. A
    plan treats it as all the memory there is, of which `profile` says how much is filled. None: what is free."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """CPU threads for tensor work, 1,024 at most. auto: one a physical core."""
    engine: Literal["auto", "native", "vllm", "sglang"] = "auto"
    """What generates. vllm needs trimtab[vllm], here or in rollout.python; sglang needs a GPU, and an environment of its own in
    rollout.python. Both draw the same tokens, up to the rounding of another forward pass. auto: vllm where
    rollout.tensor_parallel is more than 1, else the native engine, unless another is installed here and the plan says that a run
    is clearly faster with it."""
    kernels: Kernels = "auto"
    """What computes the layers of the update. native: Trimtab's fused layers, or none. liger: the model's own modules with
    Liger's norms, rotation and gated products (CUDA; pip install 'trimtab[liger]'). plain: the model's own modules. auto:
    native where it serves the model and the device, else plain; it is the fastest."""
    token_budget: PositiveInt | Auto = "auto"
    """Most tokens in one micro-batch of the update, a hard cap; also the longest sequence that can be trained on."""
    score_token_budget: PositiveInt | Auto = "auto"
    """The same cap for passes without a gradient (reference and old log-probs). auto: from memory, larger than token_budget."""
    logprob_chunk: PositiveInt | Auto = "auto"
    """Most tokens whose logits are in memory at a time."""
    checkpoint_activations: Recompute | Auto = "auto"
    """Recompute activations in the backward pass instead of keeping them. some: only what is cheap for its size, where the update
    runs through fused layers; elsewhere the same as true."""
    reward_workers: Annotated[int, Field(ge=1, le=256)] | Auto = "auto"
    """Processes that run reward functions; and as many that run an environment, where there is one. 256 at most: all of them
    start before the first step."""
    offload: Offload = Offload()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _cut_by_vllm(self) -> Self:
        if self.engine == "auto" and self.cut > 1:
            self.__dict__["engine"] = "vllm"  # the model is frozen for everybody else
        return self

    @property
    def cut(self) -> int:
        """Devices that an engine is asked to be cut over."""
        return 1 if self.rollout.tensor_parallel == "auto" else self.rollout.tensor_parallel

    @property
    def external(self) -> bool:
        """What generates is another library, in processes of its own."""
        return self.engine not in ("auto", "native")
