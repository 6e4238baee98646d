"""What a judge is told under `args`, checked before any request is made."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import regex

from trimtab.base.errors import RewardError
from trimtab.reward.judge.prompt_and_score import Template

MAX_CONCURRENCY = 1024


@dataclass(frozen=True)
class Options:
    """One judge's settings."""

    url: str
    model: str
    prompt: Template
    verbatim: bool
    system: str | None
    api_key_env: str | None
    scale: tuple[float, float]
    pattern: regex.Pattern[str] | None
    concurrency: int
    retries: int
    timeout_s: float
    cache: bool | Literal["disk"]
    temperature: float | None
    max_tokens: int | None
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """Read from the environment where it is needed, so that it is in no config, message or file."""
        return os.environ.get(self.api_key_env) if self.api_key_env else None

    def request(self, text: str) -> dict[str, Any]:
        """The body of one request."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        said = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": text}],
            **{name: value for name, value in said.items() if value is not None},
            **self.body,
        }


def read_options(**args: Any) -> Options:
    """Options from a part's `args`; a RewardError that says what to write where one of them cannot be meant."""
    if args["pattern"] is not None:
        args["pattern"] = _pattern(args["pattern"])
    for name in ("model", "prompt"):
        if not isinstance(args[name], str) or not args[name].strip():
            raise wrong(name, args[name], "text")
    _check_url(args["url"])
    if not isinstance(args["verbatim"], bool):
        raise wrong("verbatim", args["verbatim"], "true or false")
    args["prompt"] = Template(args["prompt"], reserved=set(args), verbatim=args["verbatim"])
    if args["system"] is not None and not isinstance(args["system"], str):
        raise wrong("system", args["system"], "text")
    _check_key(args["api_key_env"])
    args["scale"] = _scale(args["scale"])
    _whole("concurrency", args["concurrency"], 1, MAX_CONCURRENCY)
    _whole("retries", args["retries"], 0, 20)
    if not _number(args["timeout_s"]) or args["timeout_s"] <= 0:
        raise wrong("timeout_s", args["timeout_s"], "seconds, a number above 0")
    if args["cache"] not in (True, False, "disk"):
        raise wrong("cache", args["cache"], "true, false or disk")
    if args["temperature"] is not None and (not _number(args["temperature"]) or args["temperature"] < 0):
        raise wrong("temperature", args["temperature"], "a number of at least 0, or null to send none")
    if args["max_tokens"] is not None:
        _whole("max_tokens", args["max_tokens"], 1, 2**31)
    args["body"] = _body(args["body"])
    return Options(**{**args, "url": args["url"].rstrip("/")})


def wrong(name: str, value: Any, takes: str) -> RewardError:
    return RewardError(f"reward.args: judge: {name} is {value!r}, but it takes {takes}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}")


def _check_url(url: Any) -> None:
    if not isinstance(url, str):
        raise wrong("url", url, "an address such as http://localhost:8000/v1")
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise RewardError(
            "reward.args: judge: the url holds a user name or password, which config.yaml would keep. Put the key into an "
            "environment variable and name that: api_key_env: JUDGE_KEY"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong("url", url, "an address such as http://localhost:8000/v1")
    if parts.query or parts.fragment:
        raise RewardError("reward.args: judge: url has a ? or # in it. Write the address up to /v1")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        raise RewardError(
            f"reward.args: judge: Trimtab adds /chat/completions to url. Write "
            f"{url.rstrip('/').removesuffix('/chat/completions')}"
        )


def _check_key(name: Any) -> None:
    if name is None:
        return
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # The value is not repeated: what was written here may be the key itself.
        raise RewardError(
            "reward.args: judge: api_key_env takes the name of an environment variable, not the key itself"
        )
    if not os.environ.get(name):
        raise RewardError(
            f"reward.args: judge: the environment has no {name}. Set it (export {name}=…), or leave api_key_env out for an "
            "endpoint that wants no key"
        )


def _scale(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_number, value)) or value[0] >= value[1]:
        raise wrong("scale", value, "the lowest and the highest score, such as [0, 10]")
    return float(value[0]), float(value[1])


def _pattern(value: Any) -> regex.Pattern[str]:
    if not isinstance(value, str):
        raise wrong("pattern", value, "a regular expression with one group, the number")
    try:
        found = regex.compile(value)
    except regex.error as error:
        raise RewardError(f"reward.args: judge: pattern {value!r} is not a regular expression: {error}") from error
    if found.groups != 1:
        raise RewardError(
            f"reward.args: judge: pattern {value!r} has {found.groups} groups. Write one around the number, such as "
            r"'Rating: (\d+)'"
        )
    return found


def _body(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong("body", value, "a mapping of further fields of the request")
    for name in ("model", "messages", "stream", "n"):
        if name in value:
            raise RewardError(f"reward.args: judge: Trimtab sets body.{name} itself. Leave it out")
    return value
