"""The vocabulary of a framework's table: what becomes of a flag, one rule each.

A rule lists a flag's names: today's first, then older ones, and after a bar those that guides use and the framework never had.
A name that ends in `.*` stands for all names that begin so, have no rule of their own and are no slip for one that has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.base.suggestions import nearest

MIN_NAME_SIMILARITY = 0.75
"""How much alike two names are where one is taken for the other (1 is equal)."""
OutcomeName = Literal["mapped", "automatic", "dead", "unsupported"]
Take = Callable[[Any], Any]
"""From the flag's value to the key's; raises ValueError with what it takes where it cannot. None: the flag says nothing."""

REWARD_MODEL = (
    "it must be a transformers sequence classification model with one label, such as `trimtab reward-model` writes; serve any "
    "other kind, and call it from a reward function of your own"
)
SCORED = "Trimtab loads the reward model beside the policy, counts it in the plan, and packs the samples that it scores"
SFT = "supervised training has its own command, `trimtab sft`; set model.path here to its final/ folder"
PAIRS = "training a reward model has its own command: `trimtab reward-model`"
CRITIC = "learn.critic."
CRITIC_LIKE_POLICY = "Trimtab packs, plans and checkpoints the critic in the same way as the policy"
SHARED = "the critic uses the policy's optimizer and schedule; only its learning rate is separate: learn.critic.lr"
PPO = "gae means PPO with a critic, a second model in memory, which `trimtab plan` counts"
LIGER = (
    "Trimtab's own fused layers are faster, and it never holds the logits of a whole batch; run.kernels: liger uses Liger's "
    "norms, rope and gated products where Liger is installed"
)
NORMALISED = "advantages are normalised over all tokens of the step"


class Null:
    """What `take` returns for a key that is to be null; None leaves the key out."""


NULL = Null()


@dataclass(frozen=True)
class ConvertRule:
    outcome: OutcomeName
    name: str
    """Today's name."""
    old: tuple[str, ...]
    never: tuple[str, ...]
    key: str
    """Where it goes; for `automatic` the key that pins it."""
    note: str
    take: Take | None
    """None: worked out together with other flags."""
    secret: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.old, *self.never)


def _rule(
    outcome: OutcomeName, names: str, key: str, note: str, take: Take | None, secret: bool = False
) -> ConvertRule:
    real, _, never = names.partition("|")
    first, *old = real.split()
    return ConvertRule(outcome, first, tuple(old), tuple(never.split()), key, note, take, secret)


def mapped(names: str, key: str, take: Take, note: str = "", secret: bool = False) -> ConvertRule:
    """Goes to a key by itself."""
    return _rule("mapped", names, key, note, take, secret)


def together(names: str, key: str, note: str = "", secret: bool = False) -> ConvertRule:
    """Goes to a key, worked out from several flags by the framework's `settle`."""
    return _rule("mapped", names, key, note, None, secret)


def automatic(names: str, note: str, pin: str = "") -> ConvertRule:
    """Trimtab decides it; `pin` is the key with which a user may."""
    return _rule("automatic", names, pin, note, None)


def dead(names: str, note: str) -> ConvertRule:
    """Does nothing there, or not what is said of it."""
    return _rule("dead", names, "", note, None)


def unsupported(names: str, note: str) -> ConvertRule:
    return _rule("unsupported", names, "", note, None)


def each(rule: Callable[..., ConvertRule], names: str, *said: Any) -> tuple[ConvertRule, ...]:
    """The same rule for several flags."""
    return tuple(rule(name, *said) for name in names.split())


# --- what a key takes


def number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("takes a number")
    return value


def real(value: Any) -> float:
    return float(number(value))


def whole(value: Any) -> int:
    if number(value) != int(value):
        raise ValueError("takes a whole number")
    return int(value)


def norm(value: Any) -> float | Null:
    """A norm to clip at; 0, -1 and null there are no clipping, which is null here."""
    return real(value) if value is not None and real(value) > 0 else NULL


def yes(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("takes true or false")
    return value


def text(value: Any) -> str:
    if value is None or isinstance(value, bool | list | dict):
        raise ValueError("takes text")
    return str(value)


def every(value: Any) -> int:
    """A period in steps; there -1 is never, here 0 is."""
    return max(whole(value), 0)


def some(take: Take) -> Take:
    """The same, where nothing may be said: null leaves the key out."""
    return lambda value: None if value is None else take(value)


def positive(value: Any) -> int | None:
    """A count where 0, -1 and null mean no limit."""
    return None if value is None or whole(value) < 1 else whole(value)


def pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("takes two numbers")
    return [real(item) for item in value]


def texts(value: Any) -> list[str]:
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def mapping(value: Any) -> dict[str, Any]:
    """Names and values, also as JSON in one text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            value = None
    if not isinstance(value, dict):
        raise ValueError('takes names and values, {"name": value}')
    return value


def one_of(choices: Mapping[Any, Any]) -> Take:
    def take(value: Any) -> Any:
        if isinstance(value, list | dict) or value not in choices:
            near = nearest(str(value), [choice for choice in choices if isinstance(choice, str)], MIN_NAME_SIMILARITY)
            meant = f" (is {near} meant?)" if near else ""
            raise ValueError(f"takes one of {', '.join(map(str, choices))}{meant}")
        return choices[value]

    return take
