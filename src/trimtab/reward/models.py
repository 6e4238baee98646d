"""Reward models as rewards: a sequence-classification model with one label scores whole conversations, packed, on the device.

The model has its own tokenizer and chat template: a prompt and its completion are written by them as a worked answer is, with
the token that ends it, and the score is read after that. What `trimtab reward-model` wrote beside its model (reward.json) is
added, so that scores are normalised. Samples are scored together, packed into rows of at most REWARD_ROW_TOKENS (fewer where
memory is short).

Work is done when the scorer collects, in the trainer's own thread: the device is the trainer's.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from trimtab.base.errors import DataError, ModelError, RewardError, first_line
from trimtab.config.contradiction import REWARD_MODEL
from trimtab.config.sft import SftData
from trimtab.data.examples import ExampleEncoder
from trimtab.data.trial import try_template
from trimtab.model.attention import ATTENTION_NAME
from trimtab.model.context import context_of
from trimtab.model.load import find_source
from trimtab.model.memory import Shortage, attempt, free
from trimtab.model.packed import PackedPlan
from trimtab.model.sizes import REWARD_ROW_TOKENS
from trimtab.reward.pool import RewardRequest
from trimtab.workers.messages import Cell, Failure
from trimtab.workers.pool import Reply

NO_CHAT_TEMPLATE = (
    "the prompt is messages, but the reward model's tokenizer has no chat template to write them. Make the prompts strings, or "
    "give the reward model's folder a tokenizer with a template"
)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest distance between a score packed and alone, relative to 1 + its size."""


def refuse_other_models(path: str) -> None:
    """Tell from the config alone what is no reward model."""
    also = ""
    try:
        source = find_source(path)
        also = source.also
        config = AutoConfig.from_pretrained(source.location)
    except Exception as error:  # transformers and the hub raise a score of types
        why = first_line(error).removeprefix("model.path: ")
        raise RewardError(f"reward.fn: cannot read {REWARD_MODEL}{path}: {why} {also}".rstrip()) from error
    kinds = getattr(config, "architectures", None) or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds) or config.num_labels != 1:
        raise RewardError(
            f"reward.fn: {path} is {', '.join(kinds) or 'a model without an architecture'} with {config.num_labels} labels; a "
            "reward model is a sequence classification model with one label. `trimtab reward-model` writes one to RUN/final"
        )


def _shift(facts: Path) -> float:
    try:
        return float(json.loads(facts.read_text())["shift"])
    except (ValueError, TypeError, KeyError, RecursionError, OSError) as error:
        raise RewardError(
            f"reward.fn: {facts} is damaged: its shift is missing ({type(error).__name__}: {error}). Train the reward model again"
        ) from error


class Classifier:
    """One reward model."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype) -> None:
        location = find_source(path).location
        self.path = path
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(location, dtype=dtype).to(device).eval()
        self.model.requires_grad_(False)
        facts = Path(location) / "reward.json"
        self.shift = _shift(facts) if facts.is_file() else 0.0
        tokenizer = AutoTokenizer.from_pretrained(location)
        self._encoder = ExampleEncoder(SftData(train="-"), "last", tokenizer, f"reward {REWARD_MODEL}{path}")
        if self._encoder.templated:
            try_template(
                [partial(self._encoder.rendered, 0, {"prompt": "1", "completion": "1"})], f"reward {REWARD_MODEL}{path}"
            )
        self._device, self._tokens = device, REWARD_ROW_TOKENS
        self.passes = 0
        """Packed rows so far: whoever watches sees that it works."""
        self._context = context_of(self.model.config.get_text_config())
        self._check(dtype)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def score(self, prompts: Sequence[Any], completions: Sequence[Any], share: int = 0, shares: int = 1) -> list[Cell]:
        """A score for each completion, or why there is none. Of several `shares` only one is computed, None for the others; rows
        are packed as for all of them, so the scores are the same."""
        rows: dict[int, list[int]] = {}
        cells: list[Cell] = [None] * len(prompts)
        for number, (prompt, completion) in enumerate(zip(prompts, completions)):
            found = self._tokens_of(prompt, completion)
            if isinstance(found, Failure):
                cells[number] = found
            else:
                rows[number] = found
        for place, numbers in enumerate(self._packed(rows, self._tokens if shares == 1 else REWARD_ROW_TOKENS)):
            if place % shares != share:
                continue
            for number, value in zip(numbers, self._scores([rows[n] for n in numbers])):
                cells[number] = value + self.shift
        return cells

    def _tokens_of(self, prompt: Any, completion: Any) -> list[int] | Failure:
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        if not text:
            return Failure("invalid", "the completion is empty, so a reward model has nothing to score")
        if not isinstance(prompt, str):
            if not self._encoder.templated:
                return Failure("invalid", NO_CHAT_TEMPLATE)
            if prompt[-1]["role"] == "assistant":  # it was continued: what both say is one answer
                prompt, text = prompt[:-1], (prompt[-1].get("content") or "") + text
        try:
            tokens = self._encoder.encode([0], [{"prompt": prompt, "completion": text}])[0].tokens
        except DataError as error:
            return Failure("invalid", str(error).replace(", row 1 (from 1)", ""))  # it is of no data set
        if len(tokens) > self._context:
            return Failure("invalid", f"{len(tokens)} tokens exceed the reward model's context of {self._context}")
        return tokens

    def _packed(self, rows: dict[int, list[int]], most: int) -> Iterator[list[int]]:
        """Numbers of rows that are scored together, by length: up to so many tokens."""
        chosen: list[int] = []
        room = 0
        for number in sorted(rows, key=lambda n: len(rows[n])):
            if chosen and room + len(rows[number]) > most:
                yield chosen
                chosen, room = [], 0
            chosen.append(number)
            room += len(rows[number])
        if chosen:
            yield chosen

    def _scores(self, rows: list[list[int]]) -> list[float]:
        outcome = attempt(lambda: self._forward(rows))
        if not isinstance(outcome, Shortage):
            return outcome
        free(self._device)
        if len(rows) == 1:
            raise RewardError(
                f"reward {REWARD_MODEL}{self.path} ran out of memory on {len(rows[0])} tokens: {outcome.message}"
            )
        self._tokens = max(1, sum(map(len, rows)) // 2)
        half = len(rows) // 2
        return [*self._scores(rows[:half]), *self._scores(rows[half:])]

    @torch.no_grad()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        self.passes += 1
        plan = PackedPlan([len(row) for row in rows], self._device)
        tokens = torch.tensor([token for row in rows for token in row], device=self._device)
        out = self.model.get_decoder()(
            input_ids=tokens[None],
            position_ids=plan.positions[None],
            attention_mask=None,
            use_cache=False,
            attention_plan=plan,
        )
        last = torch.tensor([len(row) for row in rows], device=self._device).cumsum(0) - 1
        scores: list[float] = self.model.score(out.last_hidden_state[0, last])[:, 0].double().cpu().tolist()
        return scores

    @torch.no_grad()
    def _check(self, dtype: torch.dtype) -> None:
        """Packed, two short sequences must get the scores that each gets alone through transformers."""
        words = torch.Generator().manual_seed(0)
        size = self.model.config.get_text_config().vocab_size
        rows = [torch.randint(0, size, (n,), generator=words, device="cpu").tolist() for n in (7, 12)]
        alone = [float(self.model(input_ids=torch.tensor([row], device=self._device)).logits[0, 0]) for row in rows]
        self.model.set_attn_implementation(ATTENTION_NAME)
        try:
            packed = self._forward(rows)
        except (AssertionError, TypeError, RuntimeError, AttributeError) as error:
            raise ModelError(
                f"reward {REWARD_MODEL}{self.path} cannot run through Trimtab's attention: {error}"
            ) from error
        if any(abs(a - b) > TOLERANCE[dtype] * (1 + abs(b)) for a, b in zip(packed, alone)):
            raise ModelError(
                f"reward {REWARD_MODEL}{self.path} gives different scores when sequences are packed: "
                f"{packed} instead of {alone}. Use another reward model"
            )


class AnyClassifier(Protocol):
    """A reward model, here or on ranks."""

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[Cell]: ...


class ModelBackend:
    """Takes calls as workers do, and answers them when it is told to."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        self.needs = [frozenset[str]() for _ in paths]
        self._models: list[AnyClassifier] = []
        self._waiting: deque[RewardRequest] = deque()

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        self._models = [Classifier(path, device, dtype) for path in self.paths]

    def use(self, models: Sequence[AnyClassifier]) -> None:
        """Models that were loaded elsewhere, in the order of the paths."""
        self._models = list(models)

    def call(self, request: RewardRequest) -> None:
        self._waiting.append(request)

    def work(self) -> None:
        """Answer everything that waits, all of a model's samples together."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]  # another thread may add to them
        for number, model in enumerate(self._models):
            mine = [request for request in waiting if request.part == number]
            if not mine:
                continue
            started = time.monotonic()
            asked = [request.arguments() for request in mine]
            cells = model.score(
                [p for offered in asked for p in offered["prompts"]],
                [c for offered in asked for c in offered["completions"]],
            )
            seconds = (time.monotonic() - started) / len(mine)
            for request in mine:
                request.reply(Reply(cells[: request.count], seconds))
                cells = cells[request.count :]

    def raise_if_broken(self) -> None:
        assert self._models or not self._waiting, "a reward model was asked before it was loaded"

    def close(self) -> None:
        self._models, self._waiting = [], deque()
