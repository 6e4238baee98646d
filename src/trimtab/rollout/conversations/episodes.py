"""Conversations between an engine and environments: an engine's groups in, groups of whole conversations out.

Guarantees, besides those of an engine (rollout/engine.py), of which nothing but `generate` is used:
- Token in, token out. What the model drew is what it goes on from and what is learned; what the environment says is tokenised
  once.
- All that follows the prompt, the environment's words included, has at most `max_new_tokens` tokens, so what was planned holds.
- Random numbers depend on the conversation and the position in it: not on schedule, workers, or what else is under way.
- A conversation ends with a token of the model's. What the environment said last is not in it, as nobody reads it.
- A conversation whose environment fails comes back with the reason, and without a reward.

Turns are played in rounds: all conversations that go on are continued in one `generate`. While the engine decodes a round, the
environments of groups that are through with it already answer. The next begins when all have: otherwise it would depend on who
answered first which sequences decode together, and with that the last bits of their log-probs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from trimtab.base.errors import EnvError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.rollout.conversations.hosts import Answer, Hosts, Seat
from trimtab.rollout.conversations.observation import Observation
from trimtab.rollout.conversations.replies import ReplyEncoder
from trimtab.rollout.conversations.tools import END
from trimtab.rollout.conversations.wire import Opened
from trimtab.rollout.engine import Request, RolloutStats, Sampler
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.stops import decode_all
from trimtab.rollout.trajectory import Finish, Group, Played, Trajectory
from trimtab.workers.messages import Failure

SEEDS = (1 << 63) - 1


@dataclass(eq=False)
class Episode:
    """One conversation in the making."""

    request: Request
    group: int
    place: int
    """Among the samples of its request."""
    seat: Seat
    prompt: Prompt
    limit: int
    """Tokens that may follow the prompt."""
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    versions: list[torch.Tensor] = field(default_factory=list)
    played: Played = field(default_factory=Played)
    turns: int = 0
    """Turns that the model has had."""
    finish: Finish | None = None
    failure: str | None = None

    @property
    def sample(self) -> int:
        return self.request.first_sample + self.place

    @property
    def seed(self) -> int:
        """What the environment's next call is seeded with."""
        request = self.request
        return stream_key(request.seed, request.step, request.prompt.id, self.sample, -1 - self.turns) & SEEDS

    def fail(self, why: str) -> None:
        what = f"step {self.turns}" if self.turns else "reset"
        self.failure, self.finish = f"environment, {what}: {why}", "failed"

    def add(self, tokens: list[int], own: bool) -> None:
        self.tokens += tokens
        self.own += [own] * len(tokens)

    def trajectory(self) -> Trajectory:
        assert self.finish is not None
        none = torch.empty(0)
        return Trajectory(
            prompt=self.prompt,
            sample=self.place,
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.cat([none, *self.logprobs]),
            versions=torch.cat([none.int(), *self.versions]),
            finish=self.finish,
            failure=self.failure,
            failed_in="environment" if self.failure else "reward",
            own=None if all(self.own) else torch.tensor(self.own),
            played=self.played,
        )


class Episodes:
    """Plays the groups of a run."""

    def __init__(self, engine: Sampler, hosts: Hosts, replies: ReplyEncoder) -> None:
        self._engine, self._hosts, self._replies = engine, hosts, replies
        self.stats = RolloutStats()
        """What all rounds of the latest `generate` did."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        """Yield every request's group once, as soon as its last conversation is over."""
        self.stats = RolloutStats()
        self._hosts.forget()
        groups = [self._begin(request, index) for index, request in enumerate(requests)]
        episodes = [episode for group in groups for episode in group]
        waiting = dict(enumerate(groups))
        try:
            if self._hosts.stateful:
                for episode in episodes:
                    self._hosts.reset(episode, episode.seat, episode.seed, episode.request.prompt.columns)
                yield from self._settle(waiting)
            while going := [episode for episode in episodes if episode.finish is None]:
                asked, players = self._continued(going)
                for group in self._engine.generate(asked):
                    for trajectory, episode in zip(group.trajectories, players[group.index], strict=True):
                        self._hear(episode, trajectory)
                    for answer in self._hosts.ready():
                        self._take(answer)
                    yield from self._complete(waiting)
                self.stats.add(self._engine.stats)
                yield from self._settle(waiting)
        finally:
            for episode in episodes:
                self._hosts.end(episode.seat)
        assert not waiting

    def _begin(self, request: Request, index: int) -> list[Episode]:
        return [
            Episode(request, index, place, self._hosts.seat(), request.prompt, limit)
            for place, limit in enumerate(request.limits)
        ]

    def _continued(self, going: list[Episode]) -> tuple[list[Request], list[list[Episode]]]:
        """What the engine is asked for, and who each sample is for: samples that have read the same are one request."""
        asked: list[Request] = []
        players: list[list[Episode]] = []
        for episode in going:
            together = players[-1] if players else []
            if together and _same_start(together, episode):
                together.append(episode)
            else:
                players.append([episode])
        for together in players:
            first = together[0]
            prompt = replace(first.request.prompt, tokens=first.prompt.tokens + first.tokens)
            left = [episode.limit - len(episode.tokens) for episode in together]
            asked.append(
                replace(
                    first.request,
                    prompt=prompt,
                    samples=len(together),
                    max_new_tokens=left,
                    first_sample=first.sample,
                    first_position=len(first.tokens),
                    sampling=self._sampling(first.request),
                )
            )
        return asked, players

    def _sampling(self, request: Request) -> Sampling:
        """Without a chat template the end of a call ends the turn: nothing else says that the model waits for an answer."""
        sampling = request.sampling
        if self._hosts.stateful or self._replies.templated or END in sampling.stop:
            return sampling
        return sampling.with_values({"stop": [*sampling.stop, END]})

    def _hear(self, episode: Episode, said: Trajectory) -> None:
        """One turn of the model. One that was cut short by the limit is not shown to the environment."""
        tokens = said.tokens.tolist()
        episode.add(tokens, own=True)
        episode.logprobs.append(said.logprobs)
        episode.versions.append(said.versions)
        episode.turns += 1
        text = self._replies.said(tokens)
        episode.played.turns.append({"role": "assistant", "content": text})
        if said.finish == "length":
            episode.finish = "length"
        else:
            self._hosts.step(episode, episode.seat, episode.seed, text)

    def _take(self, answer: Answer) -> None:
        """What an environment answered, and how the conversation goes on."""
        episode, result = answer.tag, answer.result
        episode.played.seconds += answer.seconds
        if isinstance(result, Failure):
            episode.fail(str(result))
            return
        try:
            if isinstance(result, Opened):
                self._open(episode, result)
            else:
                self._go_on(episode, result.observation)
        except (
            EnvError
        ) as error:  # it cannot be written down: messages without a template, or a template that refuses them
            episode.fail(str(error))

    def _go_on(self, episode: Episode, seen: Observation) -> None:
        """What was said to one turn."""
        played = episode.played
        played.earned += seen.reward or 0.0
        played.counts.update(seen.counts)
        if seen.done:
            episode.finish = "stop"
        elif episode.turns == self._hosts.settings.max_turns:
            episode.finish = "turns"
        else:
            left = episode.limit - len(episode.tokens)
            tokens = (
                None if self._replies.exceeds(seen.reply, left) else self._replies.after(seen.reply, episode.tokens[-1])
            )
            if tokens is None or len(tokens) >= left:
                episode.finish = "length"
                return
            episode.add(tokens, own=False)
            played.turns += self._replies.turns(seen.reply)

    def _open(self, episode: Episode, opened: Opened) -> None:
        """What the environment begins with becomes part of the prompt: it is read and not learned, and uses up tokens."""
        if not opened.opening:
            return
        if self._replies.exceeds(opened.opening, episode.limit):
            raise EnvError("what it returned leaves the model none of max_new_tokens")
        before = len(episode.prompt.tokens)
        tokens = self._replies.opened(episode.prompt.tokens, opened.opening)
        if len(tokens) - before >= episode.limit:
            raise EnvError(
                f"what it returned has {len(tokens) - before} tokens and leaves the model none of max_new_tokens"
            )
        episode.limit -= len(tokens) - before
        episode.prompt = replace(episode.prompt, tokens=tokens)
        episode.played.turns += self._replies.turns(opened.opening)

    def _settle(self, waiting: dict[int, list[Episode]]) -> Iterator[Group]:
        """Wait until every environment has answered, handing over groups as they become complete."""
        yield from self._complete(waiting)
        started = time.monotonic()
        while (answer := self._hosts.wait()) is not None:
            self._take(answer)
            if answer.tag.finish is not None:
                self.stats.wait_s += time.monotonic() - started
                yield from self._complete(waiting)
                started = time.monotonic()
        self.stats.wait_s += time.monotonic() - started

    def _complete(self, waiting: dict[int, list[Episode]]) -> Iterator[Group]:
        """Groups whose conversations are all over."""
        for index, episodes in list(waiting.items()):
            if all(episode.finish is not None for episode in episodes):
                del waiting[index]
                trajectories = [episode.trajectory() for episode in episodes]
                for episode in episodes:
                    self._hosts.end(episode.seat)
                for trajectory, text in zip(trajectories, self._texts(trajectories)):
                    trajectory.text = text
                yield Group(episodes[0].request.prompt, trajectories, index)

    def _texts(self, trajectories: list[Trajectory]) -> list[str]:
        return decode_all(self._replies.tokenizer, [trajectory.tokens.tolist() for trajectory in trajectories])


def _same_start(together: list[Episode], episode: Episode) -> bool:
    """The next sample of a request whose samples have all read the same: they share one prefill."""
    first, last = together[0], together[-1]
    return (
        episode.request is first.request
        and episode.place == last.place + 1
        and not episode.tokens
        and not first.tokens
        and episode.prompt.tokens == first.prompt.tokens
    )
