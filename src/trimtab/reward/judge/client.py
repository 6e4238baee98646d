"""One judge: requests with a limit on how many are in flight, with retries, a cache and numbers.

Guarantees:
- Every completion gets a score within the scale or a failure that says why; a failure is never a score.
- A completion has `limit_s` seconds from the moment it gets one of the `concurrency` places, for all its tries and the waits
  between them. Places are handed out in order, so everything that was asked for is answered, in bounded time.
- A completion keeps its place while it waits to try again: an endpoint in trouble is asked less, not more. Where the endpoint
  says how long to wait (Retry-After), no request is sent to it meanwhile.
- The same request is made once, also when it comes again while the first is still under way (not without the cache).
- The key is in the request's header and nowhere else: it is cut out of whatever an endpoint answers.

Counted for each completion: `scored`, `cache_hits` or `failed` and `failed_KIND`; for each try `requests` and its latency, and
`retries` after the first. The kinds are timeout, refused, http_STATUS, unparsable, row (it lacks a column's value) and error.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import RewardError
from trimtab.reward.judge.cache import ScoreCache
from trimtab.reward.judge.options import Options
from trimtab.reward.judge.prompt_and_score import read_score
from trimtab.workers.messages import Cell, Failure, Kind, Tally

if TYPE_CHECKING:
    import httpx2

RETRIED_STATUSES = {408, 425, 429, *range(500, 600)}
"""Statuses that may be gone at the next try."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
SHOWN_CHARACTERS = 200
"""Characters of an answer that a message shows."""
FAILURE_KINDS: dict[str, Kind] = {"timeout": "timeout", "unparsable": "invalid"}
"""How the scorer counts them; everything else is `raised`."""


@dataclass
class JudgeCall:
    """One call of the reward under way: what it has found out about the endpoint."""

    limit_s: float
    tally: Tally = field(default_factory=Tally)
    slowest_s: float = 0.0


current: ContextVar[JudgeCall] = ContextVar("current")


class Trouble(Exception):
    """Why a try has no score."""

    def __init__(self, kind: str, words: str, passing: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(words)
        self.kind, self.passing, self.wait_s = kind, passing, wait_s


class NoScore(Trouble):
    """The judge answered, but what it said has no score in it."""

    def __init__(self, words: str) -> None:
        super().__init__("unparsable", words)


class Judge:
    """An endpoint with a model that gives scores. Lives in one event loop."""

    def __init__(self, options: Options, run_dir: Path | None = None) -> None:
        self.options = options
        self._cache = ScoreCache(run_dir if options.cache == "disk" else None) if options.cache else None
        self._under_way: dict[str, asyncio.Task[float]] = {}
        self._places = asyncio.Semaphore(options.concurrency)
        self._closed_until, self._closed_by = 0.0, Trouble("http_429", "the endpoint asks to wait")
        self._client: httpx2.AsyncClient | None = None

    async def score(self, prompts: Sequence[Any], completions: Sequence[Any], rows: Sequence[dict]) -> list[Cell]:
        """One cell a completion: a reward from 0 to 1, or a failure."""
        return await asyncio.gather(*map(self._cell, prompts, completions, rows))

    async def try_out(self, body: dict[str, Any]) -> None:
        """One request, read as every later one; Trouble where it has no score."""
        await self._ask(body)

    async def models(self) -> list[str]:
        """Names of the models that the endpoint says it has; none where it does not say."""
        import httpx2

        try:
            async with asyncio.timeout(self.options.timeout_s):
                listed = (await self.client.get(f"{self.options.url}/models")).json()["data"]
            return [str(model["id"]) for model in listed]
        except (TimeoutError, httpx2.HTTPError, OSError, ValueError, LookupError, TypeError):
            return []

    async def _cell(self, prompt: Any, completion: Any, row: dict[str, Any]) -> Cell:
        counts = current.get().tally.counts
        try:
            score = await self._score(prompt, completion, row)
        except Trouble as trouble:
            counts.update(["failed", f"failed_{trouble.kind}"])
            return Failure(FAILURE_KINDS.get(trouble.kind, "raised"), f"has no score: {self.clean(str(trouble))}")
        except Exception as error:
            # Half of a character in a row, say, which no request can hold. It costs this completion alone.
            counts.update(["failed", "failed_error"])
            return Failure("raised", f"has no score: {type(error).__name__}: {self.clean(str(error))}")
        low, high = self.options.scale
        return (score - low) / (high - low)

    async def _score(self, prompt: Any, completion: Any, row: dict[str, Any]) -> float:
        counts = current.get().tally.counts
        try:
            body = self.options.request(self.options.prompt.fill(prompt, completion, row))
        except RewardError as error:
            raise Trouble("row", str(error)) from None
        if self._cache is None:
            score = await self._ask(body)
            counts["scored"] += 1
            return score
        digest = self._digest(body)
        if (known := self._cache.get(digest)) is not None:
            counts["cache_hits"] += 1
            return known
        first = digest not in self._under_way
        if first:
            self._under_way[digest] = asyncio.create_task(self._ask(body))
        try:
            score = await self._under_way[digest]
        finally:
            if first:
                del self._under_way[digest]
        if first:
            self._cache.put(digest, score)
        counts["scored" if first else "cache_hits"] += 1
        return score

    async def _ask(self, body: dict[str, Any]) -> float:
        """The score of one request, in as many tries as allowed."""
        call = current.get()
        async with self._places:
            start = time.monotonic()
            try:
                return await self._keep_asking(body, start + call.limit_s, call)
            finally:
                call.slowest_s = max(call.slowest_s, time.monotonic() - start)

    async def _keep_asking(self, body: dict[str, Any], deadline: float, call: JudgeCall) -> float:
        await self._pause(0.0, deadline, self._closed_by)
        for tried in range(self.options.retries + 1):
            call.tally.counts.update(["requests", *(["retries"] if tried else [])])
            try:
                return self._read(await self._send(body, deadline, call), body)
            except Trouble as trouble:
                if trouble.wait_s:
                    self._closed_until, self._closed_by = time.monotonic() + trouble.wait_s, trouble
                if not trouble.passing or tried == self.options.retries:
                    raise
                pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tried) * random.uniform(0.5, 1.0)
                await self._pause(pause, deadline, trouble)
        raise AssertionError("the last try raises or returns")

    def _read(self, answer: str, body: dict[str, Any]) -> float:
        judged: str = body["messages"][-1]["content"]
        score = read_score(answer, self.options.scale, self.options.pattern, judged)
        if score is None:
            low, high = self.options.scale
            raise NoScore(f"the answer has no score from {low:g} to {high:g}, or two that differ: {shown(answer)}")
        return score

    async def _pause(self, pause_s: float, deadline: float, trouble: Trouble) -> None:
        """Wait, first as long as the endpoint asked everyone to; not where there would be no time left after it."""
        now = time.monotonic()
        until = max(now, self._closed_until) + pause_s
        if until >= deadline:
            wait = f"; the next try would come in {until - now:.1f} s, after the deadline (the part's timeout_s)"
            raise Trouble(trouble.kind, f"{trouble}{wait}")
        if until > now:
            await asyncio.sleep(until - now)

    async def _send(self, body: dict[str, Any], deadline: float, call: JudgeCall) -> str:
        """One try: the text of the answer."""
        import httpx2

        start = time.monotonic()
        limit_s = min(self.options.timeout_s, max(0.0, deadline - start))
        try:
            async with asyncio.timeout(limit_s):
                response = await self.client.post(f"{self.options.url}/chat/completions", json=body)
        except TimeoutError:
            call.tally.latencies_s.append(time.monotonic() - start)
            raise Trouble("timeout", f"no answer within {limit_s:.3g} s", passing=True) from None
        except (httpx2.HTTPError, OSError) as error:
            raise Trouble("refused", f"{type(error).__name__}: {error}".rstrip(": "), passing=True) from None
        call.tally.latencies_s.append(time.monotonic() - start)
        if response.status_code != 200:
            status = response.status_code
            wait_s = retry_after_s(response.headers.get("retry-after"))
            raise Trouble(
                f"http_{status}", f"HTTP {status}: {shown(response.text)}", status in RETRIED_STATUSES, wait_s
            )
        return message_of(response.text)

    @property
    def client(self) -> httpx2.AsyncClient:
        """Made in the event loop that uses it; its connections are kept. It has no timeouts: ours are for whole requests."""
        import httpx2

        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.options.concurrency)
            key = self.options.key
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._client = httpx2.AsyncClient(timeout=None, limits=limits, headers=headers)
        return self._client

    def _digest(self, body: dict[str, Any]) -> str:
        pattern = self.options.pattern.pattern if self.options.pattern else None
        whole = json.dumps([self.options.url, body, self.options.scale, pattern], sort_keys=True, default=str)
        return hashlib.blake2b(whole.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()

    def clean(self, text: str) -> str:
        key = self.options.key
        return text.replace(key, "***") if key else text


def message_of(text: str) -> str:
    """The text of a chat completion."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise Trouble("unparsable", f"the endpoint's answer is not a chat completion: {shown(text)}")
    return content


def retry_after_s(header: str | None) -> float:
    """Seconds from a Retry-After header, which has them or a date; 0 where it has neither."""
    if not header:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        then = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def shown(text: str) -> str:
    """The end of an answer on one line: what was meant to be a score comes last."""
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN_CHARACTERS else "…" + line[-SHOWN_CHARACTERS:])
