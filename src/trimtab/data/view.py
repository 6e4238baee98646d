"""What the model will read, and what ends its answers, for people to look at before a run: most runs that learn nothing have a
prompt that is not what was meant, or answers that never stop."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from trimtab.data.deadline import render_within
from trimtab.data.examples import Checking
from trimtab.data.files import Row
from trimtab.data.pieces import MAX_TOKENS_AFTER_END, Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAST_TOKENS = 6
"""Tokens that are shown one by one, from the end."""
BEGINNING, END = 60, 180
"""Characters of a long text that are shown."""
ASKED, ANSWERED = "TRIMTABASKED", "TRIMTABANSWERED"


@dataclass(frozen=True)
class View:
    """One row as the model reads it."""

    what: str
    """prompt or example."""
    text: str
    last_tokens: list[str]
    stop_tokens: list[str] | None
    """None where nothing is generated."""
    stop_token_ids: list[int]
    stop: list[str]
    warning: str = ""
    """Answers would not end."""

    def lines(self) -> list[tuple[str, str]]:
        """For the start card: (label, words)."""
        text = self.text if len(self.text) <= BEGINNING + END else f"{self.text[:BEGINNING]} … {self.text[-END:]}"
        found = [(self.what, _quoted(text)), ("", f"ends with the tokens {', '.join(self.last_tokens)}")]
        if self.stop_tokens is not None:
            stops = [*self.stop_tokens, *(f"the text {_quoted(text)}" for text in self.stop)]
            found.append(("stops at", ", ".join(stops) or "nothing: every answer runs to the token limit"))
        return found

    def print(self, file: IO[str]) -> None:
        if self.warning:
            print(f"warning: {self.warning}", file=file)
        for label, words in self.lines():
            print(f"{label}: {words}" if label else f"  {words}", file=file)

    def facts(self) -> dict[str, Any]:
        """For --dry-run --json."""
        found: dict[str, Any] = {f"first_{self.what}": self.text, "last_tokens": self.last_tokens}
        found["warnings"] = [self.warning] if self.warning else []
        return (
            found if self.stop_tokens is None else {**found, "stop_token_ids": self.stop_token_ids, "stop": self.stop}
        )


def view(
    what: str,
    tokens: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Collection[int] | None,
    stop: Sequence[str] = (),
) -> View:
    """A row's tokens as text; `stop_token_ids` and `stop` are what ends an answer, None where there will be none."""
    ids = sorted(stop_token_ids or ())
    stops = None if stop_token_ids is None else [named(token, tokenizer) for token in ids]
    last = [named(token, tokenizer) for token in tokens[-LAST_TOKENS:]]
    return View(what, _decode(tokens, tokenizer), last, stops, ids, list(stop))


def view_example(
    unit: str, encoder: Checking[Any], row: Row, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Collection[int]
) -> View:
    """The same of a row that is learned from; with a warning where a model that has learned such answers would not stop."""
    tokens = encoder.encode([0], [row])[0].tokens
    if unit != "example":  # scores, which read an answer to its end
        return view(unit, tokens, tokenizer, None)
    warning = endless_turns(tokenizer, encoder.templated, stop_token_ids, sampled=False)
    return replace(view(unit, tokens, tokenizer, stop_token_ids), warning=warning)


def endless_turns(
    tokenizer: PreTrainedTokenizerBase,
    templated: bool,
    stop_token_ids: Collection[int],
    stop: Sequence[str] = (),
    sampled: bool = True,
) -> str:
    """What to say where the chat template ends an answer with something that does not stop generation; empty where all is well.
    `sampled`: answers are sampled in this run, not learned from."""
    found = _turn_end(tokenizer) if templated else None
    if found is None:
        return ""
    text, token = found
    if (token in stop_token_ids) or any(string in text for string in stop):
        return ""
    stops = ", ".join(named(each, tokenizer) for each in sorted(stop_token_ids)) or "none"
    if token is None:
        what = f"{_quoted(text)}, which is not a single token, so a model that learned it continues until a stop token ({stops})"
        fixes = [f"write learn.sampling.stop: [{_quoted(text)}]"] * sampled
        fixes.append("set model.tokenizer to the tokenizer that the template belongs to")
    else:
        what = (
            f"{named(token, tokenizer)}, which is not among the stop tokens ({stops}): answers run to the token limit"
        )
        fixes = [f"write learn.sampling.stop_token_ids: [{token}]"] * sampled
        fixes.append(f"add {token} to eos_token_id in the model's generation_config.json")
    fix = ", or ".join(fixes)
    return f"the chat template ends an answer with {what}. {fix[0].upper()}{fix[1:]}"


def named(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    return f"{_quoted(_decode([token], tokenizer))} ({token})"


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int | None] | None:
    """What a template writes behind an answer, and the token that it is; None where it writes nothing, or cannot be asked."""
    asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    try:
        text = render_within(lambda: str(tokenizer.apply_chat_template(asked, tokenize=False)), "model.tokenizer")
    except Exception:  # templates are foreign code; what the data needs of it has been tried
        return None
    behind = text[text.rindex(ANSWERED) + len(ANSWERED) :] if ANSWERED in text else ""
    if not behind.strip():
        return None
    pieces = Pieces(tokenizer)
    whole, bare = pieces.tokens([behind, behind.strip()], [True, True])
    ends = [token for token in whole[:MAX_TOKENS_AFTER_END] if token in pieces.ends]
    return behind.strip(), ends[0] if ends else bare[0] if len(bare) == 1 else None


def _decode(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _quoted(text: str) -> str:
    """On one line, with line ends and quotes as they are escaped in code."""
    return json.dumps(text, ensure_ascii=False)
