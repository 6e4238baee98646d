"""Settings of `run` that contradict each other or would have no effect (check.py has those of the other sections)."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import Contradiction, clash
from trimtab.config.learn import Learn
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

AnyStage = Config | SftConfig | RewardModelConfig


def offload(config: AnyStage, learn: Learn | None) -> Iterator[Contradiction]:
    if config.run.offload.activations is True and config.run.checkpoint_activations in (False, "some"):
        yield clash(
            "run.offload.activations run.checkpoint_activations",
            "needs every layer to recompute its activations, but run.checkpoint_activations excludes some or all",
            "Write run.checkpoint_activations: true, or leave one of the two out",
        )
    unneeded = learn is None or learn.kl.coef == 0 or config.model.lora is not None
    if config.run.offload.reference is True and unneeded:
        yield clash(
            "run.offload.reference learn.kl.coef model.lora",
            "there is no reference model to move: one is loaded only for a KL penalty without LoRA",
            "Leave it out",
        )


def base(config: AnyStage, learn: Learn | None) -> Iterator[Contradiction]:
    kind = config.model.base
    if kind in ("fp8", "4bit"):
        if config.model.lora is None:
            yield clash(
                "model.base model.lora",
                f"is {kind}, but without adapters the weights themselves are trained, and they cannot be in {kind}",
                "Write model.lora: {r: 16}, or model.base: bf16",
            )
        if config.run.external:
            yield clash(
                "model.base run.engine",
                f"{config.run.engine} would generate with weights of its own that are not those in {kind}",
                "Write run.engine: native, or model.base: bf16",
            )
        if config.run.shard == "full":
            yield clash(
                "model.base run.shard",
                f"weights in {kind} are whole on every device: run.shard: full cannot cut them",
                "Write run.shard: auto, or model.base: bf16",
            )
    if config.model.dtype == "float16" and config.run.devices not in ("auto", 1):
        yield clash(
            "model.dtype run.devices",
            "float16 is trained on one device: its loss scale is not shared yet",
            "Write run.devices: 1, or model.dtype: float32",
        )
    if config.model.kv_dtype != "auto":
        if learn is None:
            yield clash("model.kv_dtype", "has no effect: nothing is generated", "Leave it out")
        elif config.run.external:
            yield clash(
                "model.kv_dtype run.engine",
                f"is of the native engine, and has no effect on {config.run.engine}",
                "Write run.engine: native, or leave it out",
            )


def kernels(config: AnyStage, learn: Learn | None) -> Iterator[Contradiction]:
    if config.run.kernels in ("native", "liger") and config.run.device == "cpu":
        yield clash(
            "run.kernels run.device", f"{config.run.kernels} needs a CUDA device, and run.device is cpu", "Write auto"
        )


def prefetch(config: AnyStage, learn: Learn | None) -> Iterator[Contradiction]:
    if config.run.prefetch not in ("auto", 1) and config.run.shard not in ("auto", "full"):  # 1 is what a plan writes
        yield clash(
            "run.prefetch run.shard",
            f"has no effect with run.shard: {config.run.shard}, which gathers no weights ahead",
            "Write run.shard: full, or leave run.prefetch out",
        )
