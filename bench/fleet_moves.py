"""Would moving running sequences between the engines of a fleet pay? Simulated with the plan's time model; needs no GPU.

    python bench/fleet_moves.py                # a minute or two
    python bench/fleet_moves.py --seeds 5

A fleet deals samples evenly, and an engine that runs low takes what others have not started (cluster/queue.py). At the end of a
rollout engines are still left with different stragglers. A sequence that moves is prefilled where it goes, prompt and tokens so
far, and then decodes there with the same counters: the same tokens.

The rule: of the engine that would end last with n sequences, the receiver (idle, or with at most half as many) gets every second
one, by remaining length, if the later of the two then ends earlier:

    max(decode(kept), wait + prefill(moved tokens) + decode(received)) < decode(all n)

`decode` sums steps of a shrinking batch, whose time the plan's model gives. The simulation knows every length in advance and
moves cost nothing but the prefill: no message, no pages, no gap in a graph. So the gain shown is a bound that no real rule
reaches. Beside it: each engine begins with samples of every prompt (cluster/spread.py), which moves nothing.

Writes DIR/fleet_moves-DATE.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.cluster.spread import pays_to_spread
from trimtab.config.learn import Sampling
from trimtab.config.run import Run
from trimtab.data.prompt import Prompt
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.place import place_over
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.times import _Clock
from trimtab.rollout.engine import Request

GIB = 2**30
PROMPT = 512
"""Tokens."""
LENGTHS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "short answers": lambda g, prompts, samples: lognormal(g, prompts, samples, 300, 0.5, 0.4, 2048),
    "worked answers": lambda g, prompts, samples: lognormal(g, prompts, samples, 1200, 0.6, 0.5, 8192),
    "long reasoning": lambda g, prompts, samples: lognormal(g, prompts, samples, 6000, 0.8, 0.5, 32768),
}
"""Completion lengths: median, spread between prompts, spread within a prompt, limit."""


def lognormal(
    g: np.random.Generator, prompts: int, samples: int, median: float, between: float, within: float, limit: int
) -> np.ndarray:
    of_prompt = g.normal(0.0, between, (prompts, 1))
    of_sample = g.normal(0.0, within, (prompts, samples))
    return np.clip(median * np.exp(of_prompt + of_sample), 8, limit).round()


@dataclass
class Speed:
    """A decode step takes base[n] seconds and `token` more for each token of context; a prefill `prefill` a token."""

    base: np.ndarray
    token: float
    prefill: float
    rows: int
    tokens_per_step: float

    @classmethod
    def of(cls, job: Job, machine: Machine, run: Run) -> Speed:
        plan = place_over(run, job, machine)
        assert plan.fits, f"{job.shape.parameters:,} parameters do not fit"
        clock = _Clock(job, plan.machine, plan.run, plan.place)
        rows = plan.run.rollout.max_sequences
        base = np.array([0.0, *(clock._decode_step(n, 0.0) for n in range(1, rows + 1))])
        token = (clock._decode_step(rows, 1000.0) - base[rows]) / (1000.0 * rows)
        prefill = 2 * job.shape.active_parameters / clock.flops
        return cls(base, token, prefill, rows, plan.prefill_tokens_per_step)

    def decode(self, left: np.ndarray, context: np.ndarray) -> float:
        """Seconds until all of these have ended."""
        order = np.argsort(left)
        ends, running = left[order], np.arange(len(left), 0, -1)
        before = np.append(0.0, ends[:-1])
        steps, contexts = ends - before, np.cumsum(context[order][::-1])[::-1] + running * before
        return float((steps * (self.base[running] + self.token * (contexts + running * steps / 2))).sum())


@dataclass
class Engine:
    clock: float = 0.0
    left: np.ndarray = field(default_factory=lambda: np.zeros(0))
    context: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, left: Any, context: Any) -> None:
        self.left, self.context = np.append(self.left, left), np.append(self.context, context)


def rollout(
    speed: Speed, lengths: np.ndarray, prompt: int, engines: int, moving: bool = False, spread: bool = False
) -> tuple[float, int]:
    """Seconds, and sequences that moved. `spread`: each engine begins with samples of every prompt, and prefills them all."""
    fleet, moved = [Engine() for _ in range(engines)], 0
    spread = spread and lengths.size <= engines * speed.rows  # or groups wait, and go whole to whoever runs low
    waiting = deque(lengths.T.reshape(-1) if spread else lengths.reshape(-1))
    share = -(-len(waiting) // engines)
    for engine in fleet:
        first = [waiting.popleft() for _ in range(min(share, speed.rows, len(waiting)))]
        engine.add(first, np.full(len(first), prompt))
        prompts = len(lengths) if spread else len(lengths) / engines
        engine.clock = speed.prefill * prompt * prompts
    while any(len(engine.left) for engine in fleet):
        busy = min((engine for engine in fleet if len(engine.left)), key=lambda engine: engine.clock)
        steps, n = busy.left.min(), len(busy.left)
        busy.clock += steps * (speed.base[n] + speed.token * (busy.context.sum() + n * steps / 2))
        busy.left, busy.context = busy.left - steps, busy.context + steps
        alive = busy.left > 0
        busy.left, busy.context = busy.left[alive], busy.context[alive]
        for _ in range(min(len(waiting), speed.rows - len(busy.left))):
            busy.add(waiting.popleft(), prompt)
        if moving and not waiting:
            moved += move(speed, fleet)
    return max(engine.clock for engine in fleet), moved


def move(speed: Speed, fleet: list[Engine]) -> int:
    """Apply the rule to the engine that would end last and to the one with the fewest; how many moved."""
    counts = [len(engine.left) for engine in fleet]
    if 2 * min(counts) > max(counts):
        return 0
    ends = [engine.clock + speed.decode(engine.left, engine.context) for engine in fleet]
    giver = fleet[int(np.argmax(ends))]
    taker = min(fleet, key=lambda engine: len(engine.left))
    if len(giver.left) < 2 or 2 * len(taker.left) > len(giver.left):
        return 0
    order = np.argsort(-giver.left)
    going, staying = order[1::2], order[0::2]
    begins = max(taker.clock, giver.clock) + speed.prefill * giver.context[going].sum()
    received = speed.decode(np.append(taker.left, giver.left[going]), np.append(taker.context, giver.context[going]))
    kept = giver.clock + speed.decode(giver.left[staying], giver.context[staying])
    if max(kept, begins + received) >= max(ends):
        return 0
    taker.add(giver.left[going], giver.context[going])
    taker.clock = begins
    giver.left, giver.context = giver.left[staying], giver.context[staying]
    return len(going)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    lines = [
        "| model | engine | engines | completions | sequences | rollout, s | moves | spread | spread and moves | rule spreads |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-14b"):
        for name in ("native", "vllm"):
            for engines, prompts, samples in ((2, 32, 16), (8, 64, 16), (8, 256, 16)):
                for kind, draw in LENGTHS.items():
                    lines.append(compare(model, name, engines, prompts, samples, kind, draw, asked.seeds))
                    print(lines[-1], flush=True)
    today = datetime.date.today().isoformat()
    text = f"# Moving running sequences between engines, simulated ({today})\n\n{HEAD}\n" + "\n".join(lines) + "\n"
    (asked.dir / f"fleet_moves-{today}.md").write_text(text)


HEAD = """bench/fleet_moves.py: the plan's time model of H200s, prompts of 512 tokens, 16 samples each, adapters, mean over seeds.
Seconds of a rollout whose engines begin with whole groups, and how much shorter it gets: with moves of running sequences (an
upper bound: every length is known in advance, and a move costs its prefill alone), with samples of every prompt on every engine,
and with both; and whether `cluster/spread.py` spreads them there.
"""


def compare(model: str, name: Any, engines: int, prompts: int, samples: int, kind: str, draw: Any, seeds: int) -> str:
    found, decided = [], False
    for seed in range(seeds):
        lengths = draw(np.random.default_rng(seed), prompts, samples)
        shape, most = read_shape(WELL_KNOWN[model]), int(lengths.max())
        job = Job(shape, 2, prompts, samples, PROMPT, PROMPT, most, rank=16, adapters=10**7)
        machine = Machine(find_device("h200"), engines, 2048 * GIB, 128)
        speed = Speed.of(job, machine, Run(engine=name, devices=engines))
        decided = pays_to_spread(requests(prompts, samples, job.completion), engines, speed.tokens_per_step)
        ways = [
            rollout(speed, lengths, PROMPT, engines, moving, spread)
            for spread in (False, True)
            for moving in (False, True)
        ]
        found.append([seconds for seconds, _ in ways] + [moved for _, moved in ways])
    seconds = np.mean(found, axis=0)
    shorter = " | ".join(f"{(1 - each / seconds[0]) * 100:.1f} %" for each in seconds[1:4])
    rule = "yes" if decided else "no"
    return f"| {model} | {name} | {engines} | {kind} | {prompts * samples} | {seconds[0]:.1f} | {shorter} | {rule} |"


def requests(prompts: int, samples: int, limit: int) -> list[Request]:
    return [Request(Prompt(i, "", [0] * PROMPT), samples, limit, Sampling(), 0, 0) for i in range(prompts)]


if __name__ == "__main__":
    main()
