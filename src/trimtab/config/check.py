"""Contradictions: settings that are each valid but cannot be meant together.

Guarantees that a configuration which passes has no setting that is silently ignored and no combination that cannot
train. "Set by the user" means "differs from the default", never `model_fields_set`, so that a resolved config, which
writes every key out, passes when it is loaded again. `run` keys are called useless only where a whole stage has no use
for them: `trimtab tune` writes all of those of `trimtab train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from trimtab.base.errors import Problem
from trimtab.config.algorithms import GROUP_ADVANTAGES, RECIPES, resolve
from trimtab.config.contradiction import Contradiction, changed, clash, reward_name
from trimtab.config.conversation import conversation
from trimtab.config.learn import Learn
from trimtab.config.mixture import routes
from trimtab.config.objectives import curriculum, judges, normalized, reward_models, tasks
from trimtab.config.placement import placement
from trimtab.config.ranks import cut_engine, ranks
from trimtab.config.resolved import FILTERS, STOPS
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.row_ranks import longest_here
from trimtab.config.run_clashes import base, kernels, offload, prefetch
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig, SftData
from trimtab.config.sizes import too_large

Offline = SftConfig | RewardModelConfig
TASK_SOURCES = ("task:", "reasoning_gym:")
FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
NAME_EVAL_SET = "Write data.eval: FILE, or leave it out"
MIN_TEMPERATURE = 1e-4
"""Logits are float32: over a smaller number their rounding is all that is left of them, and in the end they overflow."""


def contradictions(config: Config | Offline, ignore: Collection[str] = ()) -> list[Problem]:
    """Every contradiction in a config, except those about a key in `ignore` (already reported as wrong)."""
    found = clashes(config)
    return [Problem(c.keys[0], c.what, c.fix) for c in found if not any(c.concerns(key) for key in ignore)]


def clashes(config: Config | Offline) -> list[Contradiction]:
    """Every contradiction with all the keys that it follows from."""
    if isinstance(config, Config):
        learn = resolve(config.learn)
        return [clash for check in CHECKS for clash in check(config, learn)]
    shared = (offload, base, kernels, prefetch, ranks, placement, curriculum, _data, _texts, _observe)
    return [clash for check in shared for clash in check(config, None)] + [*too_large(config), *_supervised(config)]


def _groups(config: Config, learn: Learn) -> Iterator[Contradiction]:
    grouped = learn.advantage in GROUP_ADVANTAGES
    if grouped and learn.samples_per_prompt == 1:
        yield clash(
            "learn.samples_per_prompt learn.advantage learn.algorithm",
            f"is 1, but the advantage {learn.advantage} compares the samples of one prompt: every advantage would be 0",
            "Write learn.samples_per_prompt: 8, or learn.algorithm: reinforce",
        )
    if not grouped and learn.advantage != "gae" and learn.sequences_per_step == 1:
        yield clash(
            "learn.prompts_per_step learn.samples_per_prompt learn.advantage learn.algorithm",
            f"a step has one sample, and the advantage {learn.advantage} compares samples: every advantage would be 0",
            "Write learn.prompts_per_step: 8",
        )
    if learn.dynamic_sampling.enabled and not grouped:
        yield clash(
            "learn.dynamic_sampling.enabled learn.advantage learn.algorithm",
            f"drops groups whose rewards are all equal, but the advantage {learn.advantage} learns from them",
            f"Write learn.dynamic_sampling.enabled: false, or learn.advantage: one of {', '.join(GROUP_ADVANTAGES)}",
        )
    if not learn.dynamic_sampling.enabled and changed(learn.dynamic_sampling, "max_refills"):
        yield clash(
            "learn.dynamic_sampling.max_refills learn.dynamic_sampling.enabled learn.algorithm",
            "has no effect while dynamic sampling is off",
            "Write learn.dynamic_sampling.enabled: true, or leave max_refills out",
        )


def _critic(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if learn.advantage != "gae":
        for name in changed(learn.critic):
            yield clash(
                f"learn.critic.{name} learn.advantage learn.algorithm",
                f"has no effect: the advantage {learn.advantage} uses no critic",
                f"Write learn.algorithm: ppo, or leave {name} out",
            )
    elif learn.critic.warmup_steps >= learn.steps:
        yield clash(
            "learn.critic.warmup_steps learn.steps",
            f"is {learn.critic.warmup_steps}, but the run has {learn.steps} steps: the policy would never learn",
            f"Write a number below {learn.steps}, or raise learn.steps",
        )


def _updates(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if learn.updates_per_step > learn.prompts_per_step:
        yield clash(
            "learn.updates_per_step learn.prompts_per_step",
            f"is {learn.updates_per_step}, but a step has only {learn.prompts_per_step} prompts to split over its updates",
            f"Write {learn.prompts_per_step} or less, or raise learn.prompts_per_step",
        )
    if learn.loss == "on_policy" and learn.updates_per_batch > 1:
        yield clash(
            "learn.loss learn.algorithm learn.updates_per_step learn.epochs_per_step",
            f"on_policy has no importance ratio, but a batch is used for {learn.updates_per_batch} updates and "
            "only the first of them is on-policy",
            "Write learn.updates_per_step: 1 and learn.epochs_per_step: 1, or learn.loss: clip",
        )
    if learn.old_logprobs == "engine" and learn.updates_per_batch == 1:
        yield clash(
            "learn.old_logprobs learn.updates_per_step learn.epochs_per_step",
            "engine has no effect with one update a step: the ratio is 1 by construction",
            "Leave it out. To correct a mismatch between engine and trainer, write learn.importance.level: token",
        )
    if learn.old_logprobs == "engine" and learn.updates_per_batch > 1 and learn.importance.level != "off":
        yield clash(
            "learn.importance.level learn.old_logprobs learn.updates_per_step learn.epochs_per_step",
            "corrects the difference between engine and trainer a second time: learn.old_logprobs: engine already does",
            "Write learn.importance.level: off, or learn.old_logprobs: trainer",
        )
    if learn.staleness >= learn.steps:
        yield clash(
            "learn.staleness learn.steps",
            f"is {learn.staleness}, but the run has {learn.steps} steps: the first policy would sample all of them",
            f"Write a number below {learn.steps}, or raise learn.steps",
        )
    if learn.importance.level == "off":
        for name in changed(learn.importance, "cap", "mode"):
            yield clash(
                f"learn.importance.{name} learn.importance.level",
                "has no effect while the importance correction is off",
                f"Write learn.importance.level: token, or leave {name} out",
            )


def _clip(config: Config, learn: Learn) -> Iterator[Contradiction]:
    recipe = RECIPES[learn.algorithm]
    if learn.loss == "on_policy":
        for name, usual in (("low", recipe.clip_low), ("high", recipe.clip_high)):
            if getattr(learn.clip, name) != usual:
                yield clash(
                    f"learn.clip.{name} learn.loss learn.algorithm",
                    "has no effect: the loss on_policy has no ratio to clip",
                    f"Leave {name} out, or write learn.loss: clip",
                )
    if learn.clip.dual is not None and learn.loss != "clip":
        yield clash(
            "learn.clip.dual learn.loss learn.algorithm",
            f"has no effect: learn.loss is {learn.loss}, and only the loss clip has a dual clip",
            "Leave dual out, or write learn.loss: clip",
        )


def _kl(config: Config, learn: Learn) -> Iterator[Contradiction]:
    kl = learn.kl
    if kl.target is not None and kl.coef == 0:
        yield clash(
            "learn.kl.target learn.kl.coef",
            "adapts learn.kl.coef by multiplying it, and 0 stays 0",
            "Write a starting value, such as learn.kl.coef: 0.05, or leave target out",
        )
    if kl.coef > 0 and kl.where == "loss" and kl.estimator == "k1" and not kl.corrected:
        yield clash(
            "learn.kl.estimator learn.kl.where learn.kl.coef learn.kl.corrected",
            "k1 in the loss has an expected gradient of zero: it penalises nothing",
            "Write learn.kl.estimator: k3 (or k2), learn.kl.corrected: true, or learn.kl.where: reward",
        )
    if kl.coef > 0 and kl.where != "loss" and kl.corrected:
        yield clash(
            "learn.kl.corrected learn.kl.where",
            f"has no effect: it corrects the gradient of a penalty in the loss, and learn.kl.where is {kl.where}",
            "Write learn.kl.where: loss, or leave corrected out",
        )
    if kl.coef > 0 and kl.where == "advantage" and learn.advantage in ("gae", "global_norm"):
        yield clash(
            "learn.kl.where learn.advantage learn.algorithm",
            f"advantage does the same as reward here: the advantage {learn.advantage} uses a reward for every token",
            "Write learn.kl.where: reward",
        )
    off = kl.coef == 0 and kl.target is None
    for name in changed(kl, "estimator", "where", "corrected", "horizon") if off else []:
        yield clash(
            f"learn.kl.{name} learn.kl.coef learn.kl.target",
            "has no effect while learn.kl.coef is 0",
            f"Write learn.kl.coef: 0.001, or leave {name} out",
        )
    if not off and kl.target is None and changed(kl, "horizon"):
        yield clash(
            "learn.kl.horizon learn.kl.target",
            "has no effect without learn.kl.target",
            "Write learn.kl.target: 0.05, or leave horizon out",
        )


def _schedule(config: Config, learn: Learn) -> Iterator[Contradiction]:
    schedule = learn.schedule
    total = learn.steps * (learn.updates_per_batch if schedule.unit == "update" else 1)
    if schedule.warmup_steps >= total:
        yield clash(
            "learn.schedule.warmup_steps learn.steps",
            f"is {schedule.warmup_steps}, but the run has {total} {schedule.unit}s: the learning rate never reaches learn.lr",
            f"Write {total // 10}, or raise learn.steps",
        )
    if schedule.unit == "update" and (
        learn.updates_per_batch == 1 or (schedule.kind == "constant" and not schedule.warmup_steps)
    ):
        why = "the learning rate is constant" if learn.updates_per_batch > 1 else "a step has one update"
        yield clash(
            "learn.schedule.unit learn.updates_per_step learn.epochs_per_step learn.schedule.kind",
            f"has no effect: {why}",
            "Leave unit out",
        )
    if schedule.kind == "constant" and changed(schedule, "final"):
        yield clash(
            "learn.schedule.final learn.schedule.kind",
            "has no effect with a constant learning rate",
            "Write learn.schedule.kind: cosine, or leave final out",
        )


def _sampling(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if learn.sampling.temperature < MIN_TEMPERATURE:
        yield clash(
            "learn.sampling.temperature",
            f"is {learn.sampling.temperature:g}, which is greedy: all samples of a prompt would be the same and nothing could be "
            "learned",
            "Write a temperature above 0, such as 1.0. For greedy evaluation, set eval.sampling.temperature instead",
        )
    if learn.overlong and learn.overlong.buffer >= learn.max_new_tokens:
        yield clash(
            "learn.overlong.buffer learn.max_new_tokens",
            f"is {learn.overlong.buffer}, not less than learn.max_new_tokens ({learn.max_new_tokens}): "
            "every completion would be penalised",
            f"Write {max(learn.max_new_tokens // 4, 1)}, or raise learn.max_new_tokens",
        )


def _reward(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if learn.reward_clip and learn.reward_clip[0] >= learn.reward_clip[1]:
        low, high = learn.reward_clip
        yield clash(
            "learn.reward_clip",
            f"[{low}, {high}] leaves one value at most: every reward would be the same",
            f"Write the lower bound first: [{high}, {low}]" if low > high else "Write two different bounds",
        )
    if all(part.weight == 0 for part in config.reward):
        yield clash("reward", "every weight is 0: every reward would be 0", "Give one part a weight, such as 1.0")
    names = [reward_name(part) for part in config.reward]
    for place, name in enumerate(names):
        first = names.index(name)
        if first < place:
            yield clash(
                f"reward.{place}.name reward.{place}.fn reward.{first}.name reward.{first}.fn",
                f"reward.{first} already has the name {name}: their metrics would be mixed up",
                f"Write reward.{place}.name: {name}_{place}",
            )
    if config.eval.part is not None and config.eval.part not in names:
        yield clash(
            "eval.part reward",
            f"no part of reward is called {config.eval.part}; the parts are {', '.join(names)}",
            f"Write eval.part: {names[0]}, or leave it out to use the first part",
        )


def _eval(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if config.data.eval is None:
        stops = {f"sampling.{name}": getattr(config.eval.sampling, name) or None for name in STOPS}
        idle = [f"eval.{name}" for name in changed(config.eval.with_values(stops))]  # a resolved config has [] for None
        if config.data.curriculum == "pass_rate":
            idle = [
                key for key in idle if key not in ("eval.part", "eval.threshold")
            ]  # they say what succeeds in training
        idle += ["observe.eval_every"] if config.observe.eval_every else []
        for key in idle:
            yield clash(f"{key} data.eval", "has no effect: there is no evaluation set", NAME_EVAL_SET)
        return
    if config.eval.sampling.temperature > 0:
        if config.eval.sampling.temperature < MIN_TEMPERATURE:
            yield clash(
                "eval.sampling.temperature",
                f"is {config.eval.sampling.temperature:g}: dividing logits by so small a number leaves only rounding errors",
                "Write 0, which is greedy",
            )
        return
    if config.eval.samples_per_prompt > 1:
        yield clash(
            "eval.samples_per_prompt eval.sampling.temperature",
            f"is {config.eval.samples_per_prompt}, but at temperature 0 all samples of a prompt are the same",
            "Write eval.sampling.temperature: 1.0, or eval.samples_per_prompt: 1",
        )
    for name in changed(config.eval.sampling, *FILTERS):
        yield clash(
            f"eval.sampling.{name} eval.sampling.temperature",
            "has no effect at temperature 0, which always takes the most probable token",
            f"Write eval.sampling.temperature: 1.0, or leave {name} out",
        )


def _data(config: Config | Offline, learn: Learn | None) -> Iterator[Contradiction]:
    data = config.data
    if data.options and not any(source and source.startswith(TASK_SOURCES) for source in (data.train, data.eval)):
        yield clash(
            "data.options data.train data.eval",
            "only tasks have options, and neither data.train nor data.eval names a task",
            "Write data.train: task:NAME or reasoning_gym:NAME, or leave options out",
        )
    for part in ("train", "eval"):
        source = getattr(data, part)
        if changed(data, f"{part}_split") and (source is None or source.lower().endswith(FILE_ENDINGS)):
            yield clash(
                f"data.{part}_split data.{part}",
                "has no effect: " + (f"the file {source} has no splits" if source else "there is no evaluation set"),
                f"Leave {part}_split out",
            )


def _texts(config: Config | Offline, learn: Learn | None) -> Iterator[Contradiction]:
    """Texts that the schema takes as they are, but that cannot name anything."""
    data, observe = config.data, config.observe
    texts = {
        "model.path": config.model.path,
        "data.train": data.train,
        "data.prompt": data.prompt,
        "observe.dir": observe.dir,
    }
    texts |= {f"data.{key}": text for key in ("eval", "task") if (text := getattr(data, key)) is not None}
    rewards = config.reward if isinstance(config, Config) else []
    texts |= {f"reward.{place}.fn": part.fn for place, part in enumerate(rewards)}
    if isinstance(config, Config) and config.environment is not None:
        texts |= {f"environment.tools.{place}": tool for place, tool in enumerate(config.environment.tools)}
        texts |= {} if config.environment.fn is None else {"environment.fn": config.environment.fn}
    for key, text in texts.items():
        if not text.strip():
            yield clash(key, "is empty", "Write a name, or leave the key out if it has a default")
    for field in re.findall(r"\{[^{}]*\}|[{}]", observe.dir):
        if field not in ("{name}", "{time}"):
            yield clash("observe.dir", f"has an unknown placeholder {field}", "Write {name}, {time} or plain text")


def _run(config: Config, learn: Learn) -> Iterator[Contradiction]:
    prompt = config.data.max_prompt_tokens
    longest = learn.max_new_tokens + (prompt or 1)
    parts = f"learn.max_new_tokens {learn.max_new_tokens} + " + (
        f"data.max_prompt_tokens {prompt}" if prompt else "a prompt"
    )
    for name in ("token_budget", "score_token_budget"):
        budget, here = getattr(config.run, name), longest_here(config.run, longest, name)
        if budget != "auto" and budget < here:
            yield clash(
                f"run.{name} learn.max_new_tokens data.max_prompt_tokens",
                f"is {budget} tokens, but the longest sequence has {'' if prompt else 'at least '}{longest} ({parts}) "
                f"and a sequence is never cut{'' if here == longest else f'; each device has {here} of it'}",
                f"Write {here} or more, or auto",
            )
    kv_memory = config.run.rollout.kv_memory
    if kv_memory != "auto" and kv_memory < 1024:
        yield clash(
            "run.rollout.kv_memory",
            f"is {kv_memory} bytes, which holds no sequence",
            f"Write a unit: run.rollout.kv_memory: {kv_memory}GiB",
        )


def _engine(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if not config.run.external:
        for name in ("python", "eager", "processes"):
            one = name == "processes" and config.run.rollout.processes == 1  # as it has
            if name in changed(config.run.rollout) and not one:
                yield clash(
                    f"run.rollout.{name} run.engine",
                    "has no effect on the native engine",
                    f"Write run.engine: vllm or sglang, or leave {name} out",
                )
    if config.run.cut > 1:
        yield from cut_engine(config.run)
    if not config.run.external:
        return
    if config.run.engine == "vllm" and config.model.lora is not None and config.model.lora.r > 512:
        yield clash(
            "run.engine model.lora",
            f"vllm takes adapters of rank 512 at most, and model.lora.r is {config.model.lora.r}",
            "Write run.engine: native, or a lower r",
        )
    if config.model.dtype == "float64":
        yield clash(
            "run.engine model.dtype",
            f"{config.run.engine} cannot compute in float64",
            "Write run.engine: native, or another model.dtype",
        )


def _observe(config: Config | Offline, learn: Learn | None) -> Iterator[Contradiction]:
    if config.observe.checkpoint_every == 0 and changed(config.observe, "keep_checkpoints"):
        yield clash(
            "observe.keep_checkpoints observe.checkpoint_every",
            "has no effect: only the last checkpoint is written",
            "Write observe.checkpoint_every: 50, or leave keep_checkpoints out",
        )


def _supervised(config: Offline) -> Iterator[Contradiction]:
    learn, data, run = config.learn, config.data, config.run
    if learn.steps is not None and changed(learn, "epochs"):
        yield clash("learn.steps learn.epochs", "is set, and so is learn.epochs", "Keep one of the two")
    if learn.steps is not None and learn.schedule.warmup_steps >= learn.steps:
        yield clash(
            "learn.schedule.warmup_steps learn.steps",
            f"is {learn.schedule.warmup_steps}, but the run has {learn.steps} steps: the learning rate never reaches learn.lr",
            f"Write a number below {learn.steps}, or raise learn.steps",
        )
    if learn.schedule.unit == "update":
        yield clash("learn.schedule.unit", "has no effect: a step has one update", "Leave unit out")
    if data.max_prompt_tokens is not None:
        yield clash(
            "data.max_prompt_tokens",
            "has no effect: learn.max_tokens limits whole examples instead",
            f"Write learn.max_tokens: {data.max_prompt_tokens}",
        )
    columns = (
        ("messages", "prompt", "completion", "text") if isinstance(data, SftData) else ("prompt", "chosen", "rejected")
    )
    if len({getattr(data, name) for name in columns}) < len(columns):
        yield clash(
            " ".join(f"data.{name}" for name in columns),
            "two of these keys name the same column",
            "Write a different column for each",
        )
    for name in ("token_budget", "score_token_budget"):
        budget = getattr(run, name)
        if budget == "auto" or learn.max_tokens is None:
            continue
        here = longest_here(run, learn.max_tokens, name)
        if budget < here:
            shared = "" if here == learn.max_tokens else f"; each device has {here} of one"
            yield clash(
                f"run.{name} learn.max_tokens",
                f"is {budget} tokens, but examples have up to {learn.max_tokens} (learn.max_tokens) and are never cut{shared}",
                f"Write {here} or more, or auto",
            )
    if config.observe.eval_every and data.eval is None:
        yield clash("observe.eval_every data.eval", "has no effect: there is no evaluation set", NAME_EVAL_SET)
    idle = [
        f"observe.{name}" for name in changed(config.observe, "samples_every", "samples_rows", "max_failed_rewards")
    ]
    idle += [f"run.rollout.{name}" for name in changed(run.rollout)]
    idle += ["run.engine"] if run.external and run.cut == 1 else []  # which alone means vllm
    idle += [f"run.{name}" for name in changed(run, "reward_workers")]
    for key in idle:
        yield clash(key, "has no effect: this stage samples nothing and scores nothing", "Leave it out")
    by_task = {"data.task": data.task is not None, "observe.kl_bands": bool(config.observe.kl_bands)}
    for key in (key for key, given in by_task.items() if given):
        yield clash(key, "has no effect: it divides samples by task, and this stage samples nothing", "Leave it out")


CHECKS: tuple[Callable[[Config, Learn], Iterator[Contradiction]], ...] = (
    too_large,
    _groups,
    _critic,
    _updates,
    offload,
    base,
    kernels,
    prefetch,
    ranks,
    placement,
    routes,
    _clip,
    _kl,
    _schedule,
    _sampling,
    _reward,
    normalized,
    judges,
    reward_models,
    tasks,
    conversation,
    _eval,
    _data,
    curriculum,
    _texts,
    _run,
    _engine,
    _observe,
)
