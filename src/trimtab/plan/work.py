"""The one way from a config to a `Job`: everything of a run's work that a plan depends on.

`trimtab plan` knows models by their configs and lengths by what the run's config states (run/shapes.py); a run has loaded and
tokenised them. Both say what they know as `Models` and `Lengths`. All else follows from the config, here, so that a plan and the
run that it is made for cannot disagree about it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.load import AnyConfig, Offline
from trimtab.config.resolved import ResolvedConfig, eval_max_new_tokens
from trimtab.config.reward_model import PairLearn
from trimtab.config.schema import Config
from trimtab.plan.job import Job
from trimtab.plan.shape import ModelShape


@dataclass(frozen=True)
class Models:
    """The models of a run."""

    shape: ModelShape
    itemsize: int
    """Bytes of a working weight."""
    adapters: int = 0
    """Parameters of the adapters; 0: every parameter is trained."""
    fused: bool = True
    """The update runs through fused layers."""
    tiled_head: bool = True
    """Log-probs come from kernels that store no logits."""
    stored: str | None = None
    """How the policy's weights are stored, where they are dequantised on loading."""
    critic: ModelShape | None = None
    reward_models: tuple[ModelShape, ...] = ()
    codes: str = "plain"
    """How the checkpoint stores the weights of layers: plain, fp8 or 4bit."""


@dataclass(frozen=True)
class Lengths:
    """The data of a run."""

    longest: int
    """Tokens of the longest prompt that is accepted; where answers are given, of the longest example or pair of answers."""
    typical: int
    """Tokens of the longest one that was seen."""
    held_out: int = 0
    """Prompts, or examples, of the evaluation set."""


def job_of(config: ResolvedConfig | Offline, models: Models, lengths: Lengths) -> Job:
    """The work of a run that trains."""
    refuse_mixture_keys(config, models.shape)
    job, lora = _job(models, lengths), config.model.lora
    job = replace(
        job,
        rank=lora.r if lora else 0,
        base=_base(config, models.codes),
        kv_stored=config.model.kv_dtype,
        adapters=models.adapters,
        eight_bit=config.learn.optimizer.states == "8bit",
        fused=models.fused,
        liger=config.run.kernels == "liger",
        tiled_head=models.tiled_head,
        checkpoints=_saves_on_the_way(config, lengths),
    )
    return (
        _sampled(config, job, models, lengths) if isinstance(config, ResolvedConfig) else _given(config, job, lengths)
    )


def refuse_mixture_keys(config: AnyConfig, shape: ModelShape) -> None:
    """Refuse keys that only mixtures have where the model is none, and adapters on experts where the engine cannot have them."""
    if (
        config.model.lora is not None
        and isinstance(config, Config)
        and config.run.external
        and _on_experts(config, shape)
    ):
        what = f"{config.run.engine} does not serve adapters on experts"
        fix = "Write run.engine: native, or name layers of attention, such as [q_proj, k_proj, v_proj, o_proj]."
        raise ConfigError([Problem("model.lora.targets", what, fix)])
    if shape.has_experts or not isinstance(config, Config):
        return
    asked = {"router_aux_coef": config.learn.router_aux_coef > 0, "router_replay": config.learn.router_replay}
    found = [
        Problem(f"learn.{key}", f"has no effect: {config.model.path} has no experts", "Leave it out.")
        for key, on in asked.items()
        if on
    ]
    if found:
        raise ConfigError(found)


def _on_experts(config: Config, shape: ModelShape) -> bool:
    assert config.model.lora is not None
    targets = config.model.lora.targets
    names = {name for block in shape.kinds for name in shape.stacks(block)}
    return bool(names) if targets == "all-linear" else any(f".{n}".endswith(f".{t}") for n in names for t in targets)


def _base(config: ResolvedConfig | Offline, codes: str) -> str:
    """How weights under adapters are stored in the run."""
    if config.model.lora is None or config.model.base == "bf16":
        return "plain"
    return codes if config.model.base == "auto" else config.model.base


def _saves_on_the_way(config: ResolvedConfig | Offline, lengths: Lengths) -> bool:
    """A checkpoint is due before the last step: every so many, or when an evaluation was the best."""
    observe, steps = config.observe, config.learn.steps
    due = [observe.checkpoint_every, observe.eval_every if lengths.held_out else 0]
    return any(every and (steps is None or every < steps) for every in due)


def evaluation_job_of(config: ResolvedConfig, models: Models, lengths: Lengths) -> Job:
    """The work of `trimtab eval`: held-out prompts are answered, nothing is learned."""
    return replace(
        _job(models, lengths),
        base=_base(config, models.codes),
        kv_stored=config.model.kv_dtype,
        prompts=lengths.held_out,
        samples=config.eval.samples_per_prompt,
        completion=eval_max_new_tokens(config),
        environment=config.environment is not None,
        training=False,
    )


def _job(models: Models, lengths: Lengths) -> Job:
    """What all kinds of work have in common."""
    return Job(
        shape=models.shape,
        itemsize=models.itemsize,
        prompts=1,
        samples=1,
        longest_prompt=lengths.longest,
        typical_prompt=lengths.typical,
        completion=1,
        reward_models=models.reward_models,
        stored=models.stored,
    )


def _sampled(config: ResolvedConfig, job: Job, models: Models, lengths: Lengths) -> Job:
    """Prompts are answered, and the answers are learned from."""
    learn, evaluated = config.learn, lengths.held_out * config.eval.samples_per_prompt
    return replace(
        job,
        prompts=learn.prompts_per_step,
        samples=learn.samples_per_prompt,
        completion=learn.max_new_tokens,
        steps=learn.steps,
        eval_sequences=evaluated,
        eval_completion=eval_max_new_tokens(config) if evaluated else 0,
        reference=learn.kl.coef > 0 and not job.rank,
        balanced=learn.router_aux_coef > 0,
        routed=learn.router_replay,
        critic=models.critic if learn.advantage == "gae" else None,
        environment=config.environment is not None,
        compared=learn.kl.coef > 0,
        old_logprobs=learn.updates_per_batch > 1 and learn.old_logprobs != "engine",
        epochs=learn.epochs_per_step,
        staleness=getattr(learn, "staleness", 0),
    )


def _given(config: Offline, job: Job, lengths: Lengths) -> Job:
    """Answers are given. Every token of the longest may be learned: memory is planned for that."""
    learn = config.learn
    return replace(
        job,
        prompts=learn.pairs_per_step if isinstance(learn, PairLearn) else learn.sequences_per_step,
        longest_prompt=1,
        typical_prompt=1,
        completion=max(1, lengths.longest - 1),
        old_logprobs=lengths.held_out > 0,
        generates=False,
    )
