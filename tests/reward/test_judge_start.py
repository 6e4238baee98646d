"""Before the run: options that cannot be meant, endpoints that do not answer, and a key that nobody gets to see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reward.local_judge import LocalJudge
from trimtab.base.errors import RewardError
from trimtab.config.schema import RewardPart
from trimtab.reward.scorer import Scorer

GIVEN = {"url": "http://localhost:1/v1", "model": "m", "prompt": "{completion}"}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"url": "localhost:8000/v1"},
        "url is 'localhost:8000/v1', but it takes an address such as http://localhost:8000/v1",
    ),
    ({"url": 8000}, "url is 8000, but it takes an address"),
    ({"url": "http://me:secret@host/v1"}, "which config.yaml would keep. Put the key into an environment variable"),
    ({"url": "http://host/v1/chat/completions"}, "Trimtab adds /chat/completions to url. Write http://host/v1"),
    ({"url": "http://host/v1?key=secret"}, "Write the address up to /v1"),
    ({"model": ""}, "model is '', but it takes text"),
    ({"prompt": "Rate this."}, "prompt has no {completion} in it"),
    ({"prompt": "{completion} {model}"}, "{model} in prompt is the name of an option of the judge"),
    ({"system": 3}, "system is 3, but it takes text"),
    ({"scale": [10, 0]}, "scale is [10, 0], but it takes the lowest and the highest score, such as [0, 10]"),
    ({"scale": 10}, "scale is 10, but it takes the lowest"),
    ({"pattern": "([0-9"}, "is not a regular expression"),
    ({"pattern": "[0-9]+"}, "has 0 groups. Write one around the number"),
    ({"concurrency": 0}, "concurrency is 0, but it takes a whole number from 1 to 1024"),
    ({"retries": 1.5}, "retries is 1.5, but it takes a whole number from 0 to 20"),
    ({"timeout_s": 0}, "timeout_s is 0, but it takes seconds, a number above 0"),
    ({"cache": "memory"}, "cache is 'memory', but it takes true, false or disk"),
    ({"temperature": -1}, "temperature is -1, but it takes a number of at least 0"),
    ({"max_tokens": 0}, "max_tokens is 0, but it takes a whole number from 1"),
    ({"verbatim": "no"}, "verbatim is 'no', but it takes true or false"),
    ({"body": []}, "body is [], but it takes a mapping"),
    ({"body": {"stream": True}}, "Trimtab sets body.stream itself"),
    ({"api_key": "sk-1"}, "judge takes no argument 'api_key'. Did you mean 'api_key_env'?"),
    ({"api_key_env": "sk-very-secret"}, "takes the name of an environment variable, not the key itself"),
    ({"api_key_env": "NO_SUCH_KEY"}, "the environment has no NO_SUCH_KEY. Set it (export NO_SUCH_KEY=…)"),
]


def start(args: dict[str, Any], timeout_s: float = 5.0) -> str:
    with pytest.raises(RewardError) as caught:
        Scorer([RewardPart(fn="judge", timeout_s=timeout_s, args=args)], workers=1, base_dir=Path())
    return str(caught.value)


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_an_option_that_cannot_be_meant(change: dict[str, Any], message: str) -> None:
    found = start({**GIVEN, **change})
    assert message in found
    assert "secret" not in found


def test_what_must_be_said() -> None:
    assert "judge needs a value for model, prompt, url" in start({})


def test_an_endpoint_that_is_down(local_judge) -> None:
    server: LocalJudge = local_judge()
    server.stop()
    found = start(server.args(retries=1))
    assert f"the judge at {server.url} is not reachable" in found
    assert "Start it, or correct url" in found


def test_an_endpoint_that_hangs(local_judge) -> None:
    found = start(local_judge("hang").args(timeout_s=0.5, retries=0))
    assert "does not answer: no answer within 0.5 s. Raise timeout_s" in found


def test_an_endpoint_without_the_model(local_judge) -> None:
    found = start(local_judge().args(model="judge-2"))
    assert "has no model 'judge-2'. Did you mean 'judge-1'?" in found
    assert "Available: judge-1, other." in start(local_judge().args(model="zzzz"))


def test_an_address_that_is_no_endpoint(local_judge) -> None:
    server: LocalJudge = local_judge()
    found = start(server.args(url=server.url.removesuffix("/v1")))
    assert "has no /chat/completions, or no model 'judge-1'" in found
    assert "end in /v1" in found


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("status:401", "refuses a request without a key (HTTP 401"),
        ("status:400", "refuses the request (HTTP 400"),
        ("status:500", "does not work: HTTP 500"),
        ("429:3600", "does not work: HTTP 429"),
        ("garbage", "is not a chat completion: '<html>gateway</html>'"),
    ],
)
def test_an_endpoint_in_trouble(local_judge, mode: str, message: str) -> None:
    assert message in start(local_judge(mode).args(retries=0))


@pytest.mark.parametrize("said", ["I give it 7", "70", "true", '{"score": true}', ""])
def test_a_judge_whose_answers_cannot_be_read(local_judge, said: str) -> None:
    server: LocalJudge = local_judge(f"say:{said}")
    found = start(server.args())
    assert "gave none of 3 trial completions a score: the answer has no score from 0 to 10, or two" in found
    assert f"that differ: {said!r}" in found
    assert "In prompt, ask for a number alone" in found and "write pattern" in found
    assert server.seen()["requests"] == 3


def test_a_judge_that_scores_one_of_them_is_no_error(local_judge, scorer) -> None:
    """What it says of one made-up answer proves little about the real ones."""
    args = local_judge("say:Paris. is worth 7").args(pattern=r"Paris\D*(\d+)")
    scorer(RewardPart(fn="judge", args=args))
    picky: LocalJudge = local_judge("picky")
    scorer(RewardPart(fn="judge", args=picky.args()))
    assert picky.seen()["requests"] == 2


def test_the_key_is_sent_and_shown_nowhere(local_judge, scorer, group, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    server: LocalJudge = local_judge()
    args = server.args(api_key_env="JUDGE_KEY", retries=0)
    one = scorer(RewardPart(fn="judge", args=args))
    server.become("status:401")  # answers with the key in the message
    given = group("score 3")
    one.submit(given)
    one.collect()
    assert server.seen()["keys"] == ["Bearer sk-very-secret"] * 2
    failure = str(given.trajectories[0].failure)
    assert "your key is Bearer ***" in failure and "secret" not in failure
    found = start(args)
    assert "refuses the key in JUDGE_KEY (HTTP 401" in found and "secret" not in found
