"""The configuration of `trimtab sft`: learning from worked answers. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimtab.config.base import PositiveInt, Section, Seed
from trimtab.config.learn import Optimizer, Schedule
from trimtab.config.run import Run
from trimtab.config.schema import Data, Model, Observe


class SftData(Data):
    """Conversations, prompts with completions, or plain text. The columns of a row decide which."""

    messages: str = "messages"
    """Column with a conversation: a list of {role, content} messages. Rows with this column are conversations."""
    completion: str = "completion"
    """Column with the answer to `prompt`: a string, or a list of messages. Used for rows without messages."""
    text: str = "text"
    """Column with plain text, all of it learned. Used for rows with neither messages nor a prompt."""


class SftLearn(Section):
    """What to learn. One size is stated, sequences_per_step."""

    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the training set."""
    steps: PositiveInt | None = None
    """Optimizer steps; None: as many as `epochs` take."""
    seed: Seed = 0
    """Seeds the order of the data."""
    sequences_per_step: PositiveInt = 64
    """Examples in one optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    schedule: Schedule = Schedule(kind="cosine", final=0.1)
    optimizer: Optimizer = Optimizer()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient of a whole step is scaled down to this norm; None: no clipping."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that are learned. assistant: every assistant turn with the token that ends it, or the completion. last: the last
    assistant turn alone. all: everything, prompts too."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every learned token of the step weighs the same. sequence_mean: every example does. Counted over the whole
    step, never over a micro-batch."""
    max_tokens: PositiveInt | None = None
    """Examples longer than this are left out, counted and reported; they are never cut. None: the model's context."""


class SftConfig(Section):
    """A supervised run: model, data, what to learn from it, how to run it."""

    stage: Literal["sft"] = "sft"
    """Marks this as a config of `trimtab sft`."""
    model: Model
    data: SftData
    learn: SftLearn = SftLearn()
    run: Run = Run()
    observe: Observe = Observe()
