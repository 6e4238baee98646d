"""What all frameworks share: environment variables, launchers and commands of a script, and sums that several need."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from math import ceil

from trimtab.base.suggestions import nearest
from trimtab.config.schema import Config
from trimtab.convert.devices import LAUNCH, launcher_line
from trimtab.convert.rules import (
    CRITIC,
    MIN_NAME_SIMILARITY,
    ConvertRule,
    OutcomeName,
    Take,
    every,
    number,
    real,
    text,
    texts,
    whole,
)
from trimtab.convert.settings import Setting
from trimtab.convert.sheet import Line, Sheet

ENVIRONMENT: dict[str, tuple[OutcomeName, str]] = {
    "NCCL_CUMEM_ENABLE": (
        "dead",
        "a workaround for vLLM before 0.16; with newer versions, 0 makes NCCL fail. Trimtab sends no weights over NCCL."
        " `trimtab doctor` checks the environment",
    ),
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": (
        "dead",
        "concerns Ray workers; one machine needs no Ray",
    ),
    "CUDA_VISIBLE_DEVICES": ("automatic", "keep it in the environment: Trimtab takes its devices from those"),
    "PYTORCH_CUDA_ALLOC_CONF": ("automatic", "keep it in the environment: torch reads it there"),
    "PYTORCH_ALLOC_CONF": ("automatic", "keep it in the environment: torch reads it there"),
    "VLLM_ATTENTION_BACKEND": ("automatic", "the native engine and the update use the same attention code"),
    "VLLM_USE_V1": ("automatic", "the native engine generates"),
    "HYDRA_FULL_ERROR": ("dead", "concerns Hydra; Trimtab reports all errors of a config at once"),
    "TOKENIZERS_PARALLELISM": ("automatic", "Trimtab tokenises prompts ahead, in a thread"),
    "WANDB_API_KEY": ("automatic", "keep it in the environment; observe.wandb names the project"),
    "WANDB_PROJECT": ("unsupported", "write observe.wandb: PROJECT"),
}
PREFIXES: dict[str, tuple[OutcomeName, str]] = {
    "NCCL_": ("automatic", "keep it in the environment if your machine needs it: devices talk over NCCL"),
    "HCCL_": ("automatic", "concerns devices that Trimtab does not run on"),
    "GLOO_": ("automatic", "keep it in the environment if your machine needs it: processes on a CPU talk over gloo"),
    "RAY_": ("automatic", "one machine needs no Ray"),
    "VLLM_": ("automatic", "the native engine generates"),
    "SGLANG_": ("automatic", "the native engine generates"),
    "CUDA_": ("automatic", "keep it in the environment if your machine needs it"),
    "TORCH_": ("automatic", "keep it in the environment if your machine needs it"),
    "HF_": ("automatic", "keep it in the environment: models and data come from the same hub"),
}
PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
COMMANDS = {
    "tensorboard": "events are in RUN/tensorboard: tensorboard --logdir RUN",
    "nsys": "every phase of every step is in RUN/trace.json, which opens in Perfetto",
    "watch": "the run's own console shows memory and time; `trimtab doctor` looks at the machine",
    "nvidia-smi": "`trimtab doctor` looks at the machine",
    "tail": "the run writes to its console and to RUN/metrics.jsonl",
    "bash": "give the script itself with --file",
    "python": "a program without settings",
    "python3": "a program without settings",
}
GSM8K_ROWS = 7473
CRITIC_TAKES: dict[str, Take] = {
    "path": text,
    "lr": real,
    "clip": real,
    "warmup_steps": every,
    "gamma": real,
    "lam": real,
}


def other(setting: Setting) -> Line | None:
    """The line of a setting that is not the framework's own; None for an unknown flag of it."""
    if setting.origin == "variable":
        unknown: tuple[OutcomeName, str] = ("unsupported", "a variable that no flag uses; Trimtab does not read it")
        family = next((said for prefix, said in PREFIXES.items() if setting.name.startswith(prefix)), unknown)
        outcome, note = ENVIRONMENT.get(setting.name, family)
        secret = any(word in setting.name for word in ("KEY", "TOKEN", "SECRET"))
        shown = Setting(setting.name, "***" if secret else setting.value, "variable")
        return Line(shown, None, outcome=outcome, notes=[note])
    if setting.origin == "launcher":
        return launcher_line(Line(setting, None, outcome="automatic", notes=[LAUNCH]), PROCESSES)
    if setting.origin == "command":
        note = COMMANDS.get(setting.name.split(" ")[0].rsplit("/", 1)[-1], "not a training command that Trimtab knows")
        return Line(setting, None, notes=[f"a command, not a setting; {note}"])
    if setting.origin == "stray":
        return Line(setting, None, notes=["a word that belongs to no flag"])
    return None


def processes(sheet: Sheet) -> int:
    """How many processes the launcher was told to start; 1 where it does not say."""
    for line in sheet.lines:
        name = line.setting.name.strip("-").replace("-", "_")
        if name in PROCESSES and isinstance(line.setting.value, int):
            return max(line.setting.value, 1)
    return 1


def split_updates(sheet: Sheet, prompts: int, parts: float, name: str, sum_: str) -> None:
    """`learn.updates_per_step` from a quotient of batch sizes; the nearest valid one where it is not whole."""
    updates = min(max(round(parts), 1), prompts)
    note = f"{sum_} = {parts:.10g} optimizer step{'s' * (parts != 1)} for each batch"
    if updates != parts:
        note += f", which Trimtab cannot do: {updates} is the nearest"
    sheet.put("learn.updates_per_step", updates, name, note=note)


def steps_from_epochs(sheet: Sheet, name: str, prompts: int | None) -> None:
    """Passes over the data, given or the framework's default, cannot be steps while the number of rows is not known; say how
    to get them."""
    passes = sheet.read(name, number, sheet.defaults[name])
    formula = f"{passes:.10g} × rows // {prompts or 'learn.prompts_per_step'}"
    limit = sheet.keys.get("data.limit")
    if limit and prompts and prompts > 0:
        formula += f" (at most {max(int(passes * limit.value // prompts), 1)}, as data.limit is {limit.value})"
    sheet.refuse(name, f"write learn.steps = {formula}")
    sheet.need("learn.steps", f"{formula}, with the rows of the training set (now Trimtab's default, 100)", False)


def choice(sheet: Sheet, name: str, known: Collection[str], absent: Mapping[str, str], otherwise: str) -> str:
    """What a flag names, where another name would be another algorithm: one that is not here, or no name at all, refuses the
    conversion. `absent` says what to do for names that the framework has and Trimtab has not."""
    value = str(sheet.read(name, str, otherwise))
    if value in absent:
        sheet.fail(name, f"{value} is not supported", absent[value])
    if value not in known:
        near = nearest(value, [*known, *absent], MIN_NAME_SIMILARITY)
        fix = f"Did you mean {near}?" if near else f"Write one of {', '.join(known)}"
        sheet.fail(name, f"{sheet.framework.title} has no {value} that Trimtab knows", fix)
    return value


def schedule(
    sheet: Sheet,
    kind: str,
    kinds: Mapping[str, str],
    ratio: str = "",
    steps: str = "",
    floor: str = "",
    *,
    updates: int = 1,
    rounded: Callable[[float], int] = ceil,
    cold: Collection[str] = (),
) -> None:
    """The learning rate's shape from its flags: name, warm-up as a fraction or in steps, and where it ends.

    `updates`: optimizer steps in a step of Trimtab, where the framework's schedule counts those; 1 where it counts as Trimtab
    does. `rounded`: how a fraction of the run becomes a number of steps. `cold`: shapes that have no warm-up there."""
    named = sheet.read(kind, str)
    shape = kinds.get(named) if named is not None else None
    if shape is not None:
        sheet.put("learn.schedule.kind", shape, kind)
        ends = sheet.read(floor, real) if floor else None
        if ends is not None and shape != "constant":
            sheet.put("learn.schedule.final", ends, floor)
    elif named is not None:
        near = nearest(named, list(kinds), MIN_NAME_SIMILARITY)
        fix = (
            f"did you mean {near}?"
            if near
            else f"write learn.schedule.kind: {', '.join(dict.fromkeys(kinds.values()))}"
        )
        sheet.refuse(kind, f"Trimtab does not have {named}: {fix}")
    if floor and sheet.given(floor) and shape in (None, "constant"):
        sheet.refuse(floor, "a constant learning rate has no final value", "dead")
    if named in cold:
        for flag in filter(None, (steps, ratio)):
            sheet.refuse(flag, f"{sheet.framework.title}'s {named} schedule has no warm-up", "dead")
    else:
        _warm_up(sheet, ratio, steps, updates, rounded)
    warm = sheet.keys.get("learn.schedule.warmup_steps")
    if updates > 1 and shape not in (None, "constant"):
        sheet.put("learn.schedule.unit", "update", kind)
    elif updates > 1 and warm is not None and warm.value > 0:
        sheet.put("learn.schedule.unit", "update", *[flag for flag in (steps, ratio) if flag])


def _warm_up(sheet: Sheet, ratio: str, steps: str, updates: int, rounded: Callable[[float], int]) -> None:
    warm = sheet.read(steps, number) if steps else None
    if warm is not None and warm >= 1:
        sheet.put("learn.schedule.warmup_steps", int(warm), steps)
    elif warm is not None and 0 < warm < 1:
        _warm_by_ratio(sheet, steps, float(warm), updates, rounded)
    elif warm is not None and sheet.given(steps):
        sheet.put("learn.schedule.warmup_steps", 0, steps, note="this setting gives no warm-up")
    if ratio and not (warm and warm > 0):
        fraction = sheet.read(ratio, real)
        if fraction is not None:
            _warm_by_ratio(sheet, ratio, fraction, updates, rounded)
    elif ratio:
        sheet.refuse(ratio, f"{steps} wins over it", "dead")


def _warm_by_ratio(sheet: Sheet, name: str, fraction: float, updates: int, rounded: Callable[[float], int]) -> None:
    steps, unit = sheet.keys.get("learn.steps"), "optimizer steps" if updates > 1 else "steps"
    if steps is not None and steps.value is not None:
        total = steps.value * updates
        warm = rounded(round(fraction * total, 6))
        sheet.put("learn.schedule.warmup_steps", warm, name, note=f"{fraction:g} × {total} {unit}")
    elif fraction == 0:
        sheet.put("learn.schedule.warmup_steps", 0, name)
    else:
        each = f" × {updates} updates a step" if updates > 1 else ""
        sheet.refuse(
            name, f"a fraction of the run: write learn.schedule.warmup_steps = {fraction:g} × learn.steps{each}"
        )


def optimizer(sheet: Sheet, name: str) -> None:
    """From the name of an optimizer: AdamW is the only one here, with moments of 32 bits or of 8."""
    kind = sheet.read(name, text)
    if kind is None:
        return
    letters = re.sub(r"[^a-z0-9]", "", kind.lower())
    if re.sub(r"paged|8bit|torch|fused|hf|apex|bnb|npu|xla|anyprecision", "", letters) not in ("adam", "adamw"):
        sheet.refuse(name, f"Trimtab does not have {kind}: it trains with AdamW, and learn.lr is its learning rate")
    elif "8bit" not in letters:
        sheet.refuse(name, "AdamW on float32 masters", "automatic")
    else:
        note = "; pages in host memory are run.offload.optimizer, where memory is short" if "paged" in letters else ""
        sheet.put("learn.optimizer.states", "8bit", name, note=f"blocks of 256 with a scale each, as in Trimtab{note}")


def reward_model(sheet: Sheet, name: str) -> None:
    """A reward model's path becomes a part of the reward, after those that are there."""
    said = sheet.read(name, text)
    for path in [part.strip() for part in (said or "").split(",") if part.strip()]:
        scored_by(sheet, path, name)


def scored_by(sheet: Sheet, path: str, name: str) -> None:
    """The next part of the reward is this model's score. Metrics call the first one reward_model; others get a name."""
    parts = [put.value for key, put in sheet.keys.items() if key.startswith("reward.") and key.endswith(".fn")]
    sheet.put(f"reward.{len(parts)}.fn", f"model:{path}", name)
    if any(str(part).startswith("model:") for part in parts):
        sheet.put(f"reward.{len(parts)}.name", f"reward_model_{len(parts)}", name)


def adapters(sheet: Sheet, rank: str, alpha: str, targets: str, dropout: str = "", usual: int = 0) -> None:
    """`model.lora` where the rank, `usual` unless it is given, is above 0; its other flags do nothing otherwise."""
    rest = [name for name in (alpha, targets, dropout) if name]
    r = sheet.read(rank, whole, usual)
    if r < 1:
        for name in (rank, *rest):
            if sheet.given(name):
                sheet.refuse(name, "no adapters are trained while the rank is 0", "dead")
        return
    sheet.put("model.lora.r", r, rank)
    scale = sheet.read(alpha, real)
    if scale is not None:
        sheet.put("model.lora.alpha", scale, alpha, note=f"the adapters' output is scaled by {scale:g} / {r}")
    layers = sheet.read(targets, lambda value: value if isinstance(value, list | str) else [text(value)])
    if layers is not None:
        names = layers if isinstance(layers, list) else [layers]
        sheet.put("model.lora.targets", "all-linear" if names == ["all-linear"] else names, targets)
    if dropout and sheet.read(dropout, real, 0.0) > 0:
        sheet.refuse(
            dropout, "Trimtab's adapters have no dropout: the engine and the trainer must agree on every log-prob"
        )
    elif dropout and sheet.given(dropout):
        sheet.refuse(dropout, "0 is the only value in Trimtab", "dead")


def clip(sheet: Sheet, both: str, low: str = "", high: str = "") -> None:
    """`learn.clip` from one bound for both sides, and one for each that wins over it."""
    usual = 0.2
    bound = sheet.read(both, real) if both else None
    below = sheet.read(low, real, bound) if low else bound
    above = sheet.read(high, real, bound) if high else bound
    if below is not None:
        sheet.put("learn.clip.low", below, *[name for name in (low, both) if name and sheet.line(name)][:1])
    if above is not None:
        sheet.put("learn.clip.high", above, *[name for name in (high, both) if name and sheet.line(name)][:1])
    if above is not None and above > (usual if below is None else below):
        sheet.say(high if high and sheet.line(high) else both, looser(above, usual if below is None else below))


def critic(sheet: Sheet, rules: Sequence[ConvertRule], estimator: str, discounted: str = "") -> None:
    """`learn.critic` from the flags whose rules name its keys. With an estimator other than gae all that is said of a critic
    does nothing; `discounted` names the flag of the discount where the estimator looks at that one all the same."""
    gamma = sheet.read(discounted, real, 1.0) if discounted else 1.0
    if estimator != "gae":
        if gamma != 1:
            sheet.refuse(
                discounted, f"{estimator} discounts rewards with it; in Trimtab only PPO does: learn.critic.gamma"
            )
            rules = [rule for rule in rules if rule.name != discounted]
        sheet.without(rules, f"has no effect: {estimator} has no critic")
        return
    for line in sheet.counting(rules):
        if line.rule and line.rule.outcome == "mapped" and line.rule.key.startswith(CRITIC):
            name = line.rule.name
            value = sheet.read(name, CRITIC_TAKES[line.rule.key.removeprefix(CRITIC)])
            if value is not None:
                sheet.put(line.rule.key, value, name)


def as_the_policy(sheet: Sheet, pairs: Mapping[str, str]) -> None:
    """A critic's own optimizer and schedule are not here; where they are the policy's, nothing is lost."""
    for name, of_policy in pairs.items():
        line, other_ = sheet.line(name), sheet.line(of_policy)
        if line and other_ and line.outcome == "unsupported" and line.setting.value == other_.setting.value:
            line.outcome, line.notes = "automatic", [*line.notes, f"the same is asked for as {other_.setting.name}"]


def looser(high: float, low: float) -> str:
    return f"an upper bound of {high:g} above a lower of {low:g} loosens the clip: tokens with a positive advantage grow further"


def needs(sheet: Sheet) -> None:
    """What no config can do without, and an evaluation set where evaluation is spoken of."""
    sheet.need("model.path", "the model to train: a hub name or a folder")
    sheet.need("data.train", "the prompts: a file, or the name of a data set")
    if sheet.framework.schema is Config and not any(key.startswith("reward.") for key in sheet.keys):
        sheet.need("reward", 'what is rewarded: a list such as [{fn: "rewards.py:score"}]')
    evaluates = [key for key in sheet.keys if key.startswith("eval.") or key == "observe.eval_every"]
    if "data.eval" not in sheet.keys:
        for key in evaluates:
            if not sheet.keys[key].given or sheet.keys[key].value == 0:
                sheet.keys.pop(key)
        if any(key in sheet.keys for key in evaluates):
            sheet.need("data.eval", "the evaluation set, which the settings of evaluation need")


def loggers(sheet: Sheet, to: str, project: str, usual: str) -> None:
    """`observe.wandb`, from the flags that list the loggers and name the project."""
    names, named = sheet.read(to, texts, []), sheet.read(project, text, usual)
    if "wandb" in names:
        sheet.put("observe.wandb", named, to, project, note="the name of the project")
    else:
        sheet.refuse(to, "console, metrics.jsonl and TensorBoard are always written", "automatic")
        sheet.refuse(project, "the run has the name of its folder: observe.dir", "automatic")
