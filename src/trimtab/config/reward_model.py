"""The configuration of `trimtab reward-model`: learning which of two answers is better. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimtab.config.base import PositiveInt, Section, Seed
from trimtab.config.learn import Optimizer, Schedule
from trimtab.config.run import Run
from trimtab.config.schema import Data, Model, Observe


class PairData(Data):
    """Pairs of answers to one prompt: a better and a worse one."""

    chosen: str = "chosen"
    """Column with the better answer: a string, or messages; with messages it may be the whole conversation."""
    rejected: str = "rejected"
    """Column with the worse answer, in the same form."""
    margin: str | None = None
    """Column with the margin by which the better answer's score should lead: a number of 0 or more. None: no margin."""


class PairLearn(Section):
    """What to learn. One size is stated, pairs_per_step."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training set."""
    steps: PositiveInt | None = None
    """Optimizer steps; None: as many as `epochs` take."""
    seed: Seed = 0
    """Seeds the order of the data."""
    pairs_per_step: PositiveInt = 64
    """Pairs in one optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Schedule = Schedule(kind="cosine", final=0.1)
    optimizer: Optimizer = Optimizer()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient of a whole step is scaled down to this norm; None: no clipping."""
    center: Annotated[float, Field(ge=0)] = 0.0
    """Weight of (score of the better + score of the worse)², which keeps scores around 0. 0: they may drift together."""
    normalize: bool = True
    """Write the model out so that its scores have mean 0 and standard deviation 1 on the evaluation set, or where there is none
    on the first 1,000 pairs of the training set."""
    max_tokens: PositiveInt | None = None
    """Pairs with a conversation longer than this are left out, counted and reported; none is cut. None: the model's context."""


class RewardModelConfig(Section):
    """A reward model: where it starts, pairs, what to learn from them, how to run it."""

    stage: Literal["reward-model"] = "reward-model"
    """Marks this as a config of `trimtab reward-model`."""
    model: Model
    data: PairData
    learn: PairLearn = PairLearn()
    run: Run = Run()
    observe: Observe = Observe()
