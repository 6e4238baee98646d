"""TRL's GRPOConfig and what comes with it, as flags, YAML or arguments in Python."""

from __future__ import annotations

from trimtab.convert import trl_ppo
from trimtab.convert.common import choice, clip, optimizer
from trimtab.convert.rules import one_of, real, yes
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.trl_common import (
    NEWEST,
    TRAINER_DEFAULTS,
    data,
    logs,
    lora,
    rewards,
    sizes,
    spelling,
    steps_and_rates,
)
from trimtab.convert.trl_table import RULES
from trimtab.convert.versions import OldDefault

CORRECTION = "vllm_importance_sampling_correction"
MODE, CAP = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
DEFAULTS = {
    **TRAINER_DEFAULTS,
    "num_generations": 8,
    "loss_type": "dapo",
    "max_completion_length": 512,
    "use_bias_correction_kl": True,
    CORRECTION: True,
    MODE: "sequence_mask",
    CAP: 3.0,
}
OLD_DEFAULTS = (
    OldDefault("1.10", "max_completion_length", 256),
    OldDefault("1.10", "use_bias_correction_kl", False),
    OldDefault("0.26", MODE, "token_truncate"),
    OldDefault("0.26", CAP, 2.0),
    OldDefault("0.26", "max_prompt_length", 512),
    OldDefault("0.23", CORRECTION, False),
    OldDefault("0.22", "loss_type", "bnpo"),
    OldDefault("0.19", "beta", 0.04),
    OldDefault("0.18", "temperature", 0.9),
    OldDefault("0.18", "top_k", 50),
    OldDefault("0.16", "loss_type", "grpo"),
)
"""From grpo_config.py and grpo_trainer.py of every release since 0.15."""
AGGREGATES = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "luspo": "sequence_sum",
}
_ANOTHER = "Write --loss_type dapo, grpo, dr_grpo or cispo after it to convert the rest: the last one counts"
NOT_HERE = {"sapo": _ANOTHER, "vespo": _ANOTHER}
ADVANTAGES = {
    "group": "group_std",
    True: "group_std",
    "batch": "group_mean_batch_std",
    "none": "group_mean",
    False: "group_mean",
}
LEARNING_RATE = 1e-6
"""GRPOConfig's own, which is Trimtab's too."""


def settle(sheet: Sheet) -> None:
    trl_ppo.not_asked(sheet)
    sizes(sheet, 8)
    _algorithm(sheet)
    clip(sheet, "epsilon", high="epsilon_high")
    _cispo(sheet)
    _kl(sheet)
    steps_and_rates(sheet, LEARNING_RATE)
    optimizer(sheet, "optim")
    _correction(sheet)
    data(sheet)
    rewards(sheet)
    logs(sheet)
    lora(sheet)


def _algorithm(sheet: Sheet) -> None:
    kind = choice(sheet, "loss_type", AGGREGATES, NOT_HERE, "dapo")
    level = choice(sheet, "importance_sampling_level", ("token", "sequence"), {}, "token")
    sheet.put(
        "learn.algorithm", "dr_grpo" if kind == "dr_grpo" else "cispo" if kind == "cispo" else "grpo", "loss_type"
    )
    notes = {
        "dapo": "TRL's dapo changes only the mean over tokens: clipping stays at epsilon, and no group is dropped",
        "bnpo": "TRL takes the mean over one process's micro-batch, Trimtab over the whole update",
    }
    sheet.put("learn.aggregate", AGGREGATES[kind], "loss_type", note=notes.get(kind, ""))
    scale = sheet.read("scale_rewards", one_of(ADVANTAGES), "group_std")
    if sheet.line("scale_rewards"):
        sheet.put("learn.advantage", scale, "scale_rewards")
    elif kind == "dr_grpo":
        sheet.put(
            "learn.advantage",
            "group_std",
            "loss_type",
            note="TRL still divides by the standard deviation; for Dr. GRPO's advantage set scale_rewards=none",
        )
    if level == "sequence" and kind == "cispo":
        fix = "Write --loss_type grpo after it for GSPO, or --importance_sampling_level token for CISPO: the last one counts"
        sheet.fail("importance_sampling_level", "Trimtab has no CISPO with one ratio for a sequence", fix)
    if level == "sequence":
        sheet.put(
            "learn.loss", "gspo", "importance_sampling_level", note="GSPO; its bounds are far smaller: 3e-4 and 4e-4"
        )
    elif sheet.given("importance_sampling_level"):
        sheet.put("learn.loss", "cispo" if kind == "cispo" else "clip", "importance_sampling_level")


def _cispo(sheet: Sheet) -> None:
    """TRL's CISPO bounds the ratio itself; Trimtab bounds its distance from 1."""
    if sheet.read("loss_type", str) != "cispo":
        return
    sheet.keys.pop("learn.clip.low", None)
    sheet.keys.pop("learn.clip.high", None)
    sheet.refuse("epsilon", "CISPO has no lower bound in TRL", "dead")
    bound = sheet.read("epsilon_high", real)
    if bound is not None and bound > 1:
        note = f"TRL bounds the ratio at {bound:g}: 1 + {bound - 1:g}"
        sheet.put("learn.clip.high", bound - 1, "epsilon_high", note=note)
        return
    at = f"at {bound:g}" if bound is not None else "at epsilon, 0.2, unless epsilon_high is given"
    differs = f"TRL bounds the ratio itself, {at}: below 1. Here the bound is above 1: learn.clip.high is 5 unless you write it"
    sheet.refuse("epsilon_high", differs)
    if bound is None:
        sheet.say("loss_type", differs)


def _kl(sheet: Sheet) -> None:
    """The penalty in the loss. TRL multiplies it by the ratio of the loss: of a token, or of a sequence."""
    name = "use_bias_correction_kl"
    if sheet.read("beta", real, 0.0) == 0:
        sheet.refuse(name, "has no effect while beta is 0", "dead")
    elif sheet.read(name, yes, False):
        whole_sequence = sheet.read("importance_sampling_level", str, "token") == "sequence"
        sheet.put("learn.kl.corrected", "sequence" if whole_sequence else True, name)
    else:
        sheet.refuse(name, "the uncorrected estimator is Trimtab's default", "dead")


def _correction(sheet: Sheet) -> None:
    """For what vLLM and the trainer make of the same weights. TRL has it where vLLM generates."""
    if not sheet.read("use_vllm", yes, False):
        for name in (CORRECTION, MODE, CAP):
            sheet.refuse(name, "has no effect without use_vllm", "dead")
        return
    if not sheet.read(CORRECTION, yes, False):
        sheet.put("learn.importance.level", "off", CORRECTION)
        for name in (MODE, CAP):
            sheet.refuse(name, "has no effect: the correction is off", "dead")
        return
    modes = {f"{level}_{how}": (level, how) for level in ("token", "sequence") for how in ("truncate", "mask")}
    level, how = sheet.read(MODE, one_of(modes), ("sequence", "mask"))
    sheet.put("learn.importance.level", level, CORRECTION, MODE)
    sheet.put("learn.importance.mode", how, MODE)
    sheet.put("learn.importance.cap", sheet.read(CAP, real, 3.0), CAP)


FRAMEWORK = Framework(
    kind="trl",
    title="TRL",
    about="`GRPOConfig`, `ModelConfig` and `ScriptArguments`: flags of `trl grpo`, its YAML, or arguments in a Python script. "
    "Other classes have tables of their own below; which one it is, the command or the class says, else an argument that one "
    "class alone has.",
    rules=RULES + trl_ppo.OWN_RULES,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
    reads="GRPOConfig",
    newest=NEWEST,
    oldest="0.15.0",
    was=OLD_DEFAULTS,
)
