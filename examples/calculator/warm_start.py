"""A small model that has seen tools used: what examples/calculator/calculator.yaml starts from.

    python examples/calculator/warm_start.py runs/calculator-start

A transformer of 0.9 million parameters is shown products of two three-digit numbers. Some are answered at once, which it cannot
learn; others are worked out with a calculator,

    417*358=<tool_call>{"name": "calculator", "arguments": {"expression": "417*358"}}</tool_call>
    <tool_response>
    149286
    </tool_response>
    149286

and that it can. At first every other one, then only one in twenty: in the end it knows how to call the tool and what to do with
its answer, but seldom does. Only what a model would write itself is learned here, as in the training that follows: the
calculator's words are not.

It takes about a minute on one core, and uses no more: in steps this small threads wait for each other longer than they work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.tasks import TASKS
from trimtab.demo import build_model
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.rollout.conversations.tools import END, OPEN, as_text
from trimtab.update.batch import Sample
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.updater import Updater

Phases = Sequence[tuple[int, float]]
Say = Callable[[str], object]
"""Tells people how far it is."""
SPECIAL = ["<pad>", "<eos>"]
CALL = (f'{OPEN}{{"name": "calculator", "arguments": {{"expression": "', f'"}}}}{END}')
WORDS = [*CALL, "\n<tool_response>\n", "\n</tool_response>\n"]
"""One token each, as frequent words are in larger vocabularies."""
DIFFICULTY = 3
PHASES = ((200, 0.5), (60, 0.05))
"""Steps, and the share of products that are worked out with the tool."""
BATCH, RATE = 64, 1e-3
TOLD_EVERY = 20
"""Steps between two lines of progress."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one a word of the tool's form."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def transcript(tokenizer: Any, row: dict[str, Any], with_tool: bool) -> Sample:
    """A worked answer; `own` marks what a model would write."""
    answer = [*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id]
    pieces = [(answer, True)]
    if with_tool:
        call = tokenizer(f"{CALL[0]}{row['prompt'].rstrip('=')}{CALL[1]}").input_ids
        reply = tokenizer(as_text([{"content": row["answer"]}])).input_ids
        pieces = [(call, True), (reply, False), (answer, True)]
    own = torch.tensor([mine for tokens, mine in pieces for _ in tokens])
    tokens = torch.tensor([token for tokens, _ in pieces for token in tokens])
    ones = torch.ones(int(own.sum()))
    return Sample(
        tokenizer(row["prompt"]).input_ids, tokens, ones, torch.empty(0), torch.zeros_like(ones), policy_mask=own
    )


def warm_start(
    policy: Policy, tokenizer: Any, phases: Phases = PHASES, seed: int = 0, say: Say = lambda text: None
) -> list[float]:
    """Supervised steps; returns the loss of each, in nats per token. With advantage 1 the on-policy loss is just that."""
    rows = TASKS["arithmetic"].generate(16_384, DIFFICULTY, seed, "train", ops="*")
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", lr=RATE))
    updater = Updater(
        policy,
        Likelihood(),
        learn,
        token_budget=8192,
        score_token_budget=8192,
        logprob_chunk=4096,
        checkpoint_activations=False,
    )
    random, losses = Random(seed), list[float]()
    total_steps, started = sum(steps for steps, _ in phases), time.monotonic()
    for share in (share for steps, share in phases for _ in range(steps)):
        samples = [transcript(tokenizer, row, random.random() < share) for row in random.choices(rows, k=BATCH)]
        total = sum(sample.learned for sample in samples)
        for sample in samples:
            sample.weights = torch.full((sample.learned,), 1 / total)
        losses.append(float(updater.step(samples, RATE * min(1.0, (len(losses) + 1) / 20), 0.0).sums["loss"]))
        done = len(losses)
        if done % TOLD_EVERY == 0 or done == total_steps:
            left = (time.monotonic() - started) / done * (total_steps - done)
            shown = f"the calculator in {share:.0%} of the answers, loss {losses[-1]:.2f} nats per token"
            say(f"step {done}/{total_steps} | {shown} | {left:.0f} s left")
    return losses


def make(folder: Path, phases: Phases = PHASES, seed: int = 0, say: Say = lambda text: None) -> list[float]:
    """The model, as a Hugging Face folder."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    policy = Policy(build_model(tokenizer, seed, context=128))
    steps = " and ".join(f"{count} with the calculator in {share:.0%} of the answers" for count, share in phases)
    say(
        f"Teaching a new model of {policy.parameter_count() / 1e6:.1f} million parameters how a calculator is called, from "
        f"products of three-digit numbers that are worked out. Supervised steps: {steps}. About a minute on one core."
    )
    losses = warm_start(policy, tokenizer, phases, seed, say)
    save_model(policy.model, tokenizer, folder)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started = time.monotonic()
    found = make(given.folder, seed=given.seed, say=partial(print, flush=True))
    print(f"{given.folder}: loss {found[0]:.2f} -> {found[-1]:.2f} nats per token, {time.monotonic() - started:.0f} s")
    print("Next: trimtab train examples/calculator/calculator.yaml, where it learns to use the calculator")
