"""The built-in reward `judge`, and the request that tries it before the run starts.

Every reward worker imports this, so the client and asyncio are imported where there is a judge.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.base.errors import RewardError
from trimtab.base.suggestions import did_you_mean
from trimtab.workers.messages import Cell

if TYPE_CHECKING:
    from trimtab.reward.judge.client import Judge, Trouble
    from trimtab.reward.judge.options import Options

_judges: dict[str, Judge] = {}
"""Those of this process, by their options: a judge's places, cache and connections are shared by all calls."""
TRIAL_SAMPLES = (("1 + 1 =", "2"), ("1 + 1 =", "3"), ("What is the capital of France?", "Paris."))
"""Prompts and completions that try a judge."""
run_dir: Path | None = None
"""Where the process keeps what goes on disk."""


def judge(
    prompts: list[Any],
    completions: list[Any],
    *,
    url: str,
    model: str,
    prompt: str,
    verbatim: bool = False,
    system: str | None = None,
    api_key_env: str | None = None,
    scale: tuple[float, float] = (0, 10),
    pattern: str | None = None,
    concurrency: int = 16,
    retries: int = 3,
    timeout_s: float = 6.0,
    cache: bool | Literal["disk"] = True,
    temperature: float | None = 0.0,
    max_tokens: int | None = 512,
    body: dict[str, Any] | None = None,
    **columns: Any,
) -> Awaitable[list[Cell]] | list[Cell]:
    """A score by a language model behind an OpenAI-compatible endpoint, from 0 (the lowest of `scale`) to 1 (the highest).

    url: the address up to /v1. prompt: what the judge reads, with {prompt}, {completion} and columns of the row in braces.
    verbatim: put completions there as they are, not between tags that nothing in them can close. system: a message before it.
    api_key_env: the environment variable that holds the key. pattern: a regular expression whose one group is the score;
    without one the answer is a number, or ends with JSON with a "score" or with a line such as "Score: 7".
    concurrency: requests in flight. retries: tries after the first, where an answer may still come (no connection, no answer
    within timeout_s, HTTP 408, 425, 429 and 5xx). cache: ask the same question once; disk: also after a resume. temperature,
    max_tokens: of the judge; null sends none. body: further fields of the request.
    """
    given = locals()
    found = judge_of(
        {name: value for name, value in given.items() if name not in ("prompts", "completions", "columns")}
    )
    if not completions:
        return []
    rows = [{name: values[sample] for name, values in columns.items()} for sample in range(len(completions))]
    return found.score(prompts, completions, rows)


def judge_of(args: dict[str, Any]) -> Judge:
    from trimtab.reward.judge.client import Judge
    from trimtab.reward.judge.options import read_options

    name = json.dumps(args, sort_keys=True, default=str)
    if name not in _judges:
        try:
            import httpx2  # noqa: F401
        except ImportError as error:
            raise RewardError("the judge needs httpx2: pip install httpx2") from error
        _judges[name] = Judge(read_options(**{**args, "body": {} if args["body"] is None else args["body"]}), run_dir)
    return _judges[name]


def columns_needed(args: dict[str, Any]) -> frozenset[str]:
    return judge_of(args).options.prompt.columns


async def attempt(args: dict[str, Any], limit_s: float) -> None:
    """Ask as every later request does but for its text; a RewardError with what to change where nothing comes of it. An answer
    without a score may be this question's fault, so others are tried before the judge is called unreadable."""
    from trimtab.reward.judge.client import JudgeCall, NoScore, Trouble, current

    one = judge_of(args)
    options = one.options
    current.set(JudgeCall(limit_s))
    for number, (prompt, completion) in enumerate(TRIAL_SAMPLES, 1):
        row = dict.fromkeys(options.prompt.columns, str(number))
        try:
            await one.try_out(options.request(options.prompt.fill(prompt, completion, row)))
            return
        except Trouble as trouble:
            if not isinstance(trouble, NoScore) or number == len(TRIAL_SAMPLES):
                raise RewardError(one.clean(await _explain(one, options, trouble))) from None


async def _explain(one: Judge, options: Options, trouble: Trouble) -> str:
    """What is wrong, and what to write instead."""
    from trimtab.reward.judge.client import NoScore

    place = f"reward.args: the judge at {options.url}"
    if trouble.kind == "refused":
        return f"{place} is not reachable ({trouble}). Start it, or correct url"
    if trouble.kind == "timeout":
        return f"{place} does not answer: {trouble}. Raise timeout_s, of args and of the part, or check why it is busy"
    if trouble.kind in ("http_401", "http_403"):
        holder = f"the key in {options.api_key_env}" if options.api_key_env else "a request without a key"
        return f"{place} refuses {holder} ({trouble}). Write api_key_env: NAME, where the environment variable NAME holds the key"
    if trouble.kind in ("http_400", "http_404", "http_422"):
        models = await one.models()
        if models and options.model not in models:
            there = did_you_mean(options.model, models) or f" Available: {', '.join(sorted(models)[:10])}."
            return f"{place} has no model {options.model!r}.{there}"
        if trouble.kind == "http_404":
            return f"{place} has no /chat/completions, or no model {options.model!r} ({trouble}). Most urls end in /v1"
        return f"{place} refuses the request ({trouble}). Change model, temperature, max_tokens or body"
    if isinstance(trouble, NoScore):
        how = "write pattern" if options.pattern is None else "correct pattern"
        return (
            f"{place} gave none of {len(TRIAL_SAMPLES)} trial completions a score: {trouble}. In prompt, ask for a number alone, "
            f"or for a last line such as 'Score: 7'; {how}; or correct scale"
        )
    return f"{place} does not work: {trouble}"
