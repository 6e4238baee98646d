"""Does `auto` find what a search would, and does it always hold?

    python bench/tuning.py grid --shapes smollm2 0.5b       # automatic sizes against every other, on the device
    python bench/tuning.py random --runs 100 --processes 4  # random models, lengths and memory limits: every run must end well

grid: for each shape, 128 prompts x 8 samples of 128 and 512 tokens. The update's tokens/s at every budget from 4k to 64k tokens,
activations kept, in part or recomputed, and decode tokens/s at every batch from 128 to 1,024. What the plan chose against the
best of them: of decoding (workload R's like), and of a step's decoding and update together (G's like). Goal T: 95 %.

random: a model of random shape, prompts and completions of random length, adapters or not, a reference or not, and a limit on the
device's memory between what the smallest plan needs and four times that (`set_per_process_memory_fraction`). Two training steps
through trimtab.train. A run ends well if it finishes, or is refused before it starts; recoveries from running out of memory are
counted. For every tenth, the gradient of one step under the plan's settings is compared with one micro-batch, unlimited.

Writes DIR/tuning_KIND-DATE.json and prints a summary.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from memory import Case, build, plan_of
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.run import Run
from trimtab.model.kernel_choice import fuse
from trimtab.model.policy import Policy
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import make_plan
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run.machine import machine_here
from trimtab.run.shapes import shape_of_model
from trimtab.run.tuner import longest_samples, time_decode, time_update
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

GIB = 2**30


def empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- grid


def grid(shape: str, device: torch.device, budgets: list[int], batches: list[int]) -> dict[str, Any]:
    policy = build(Case(shape, 0, False, 0), device)
    job = plan_of(Case(shape, 0, False, 16384), policy, device).job
    job = replace(job, prompts=128, longest_prompt=128, typical_prompt=128)
    plan = make_plan(Run(), job, machine_here(device))
    run, job = plan.run, plan.job
    engine = NativeEngine(
        policy,
        None,
        [],
        kv_bytes=run.rollout.kv_memory,
        page_tokens=run.rollout.page_tokens,
        max_sequences=max(batches),
        prefill_tokens=run.rollout.prefill_tokens,
        prefix_cache=False,
        lend_memory=bool(run.rollout.lend_memory),
    )
    decoded = {batch: time_decode(engine, job, batch).rate for batch in {*batches, run.rollout.max_sequences}}
    engine.lend()
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn(steps=1))),
        resolve(Learn(steps=1)),
        token_budget=10**9,
        score_token_budget=10**9,
        logprob_chunk=run.logprob_chunk,
        checkpoint_activations=False,
    )
    updated: dict[str, float | None] = {}
    for kept in (False, "some", True):
        updater.recompute(kept)
        for budget in {*budgets, run.token_budget}:
            updated[f"{budget}, {kept}"] = time_update(updater, job, budget).rate
    chosen = updated[f"{run.token_budget}, {run.checkpoint_activations}"] or 0.0
    best = max(rate for rate in updated.values() if rate)
    fastest = max(rate for rate in decoded.values() if rate)
    decoding = decoded[run.rollout.max_sequences] or 1e-9
    generated, trained = job.sequences * job.completion, job.step_row.tokens
    engine.close()
    return {
        "shape": shape,
        "update": updated,
        "decode": decoded,
        "chosen": {
            "token_budget": run.token_budget,
            "kept": run.checkpoint_activations,
            "max_sequences": run.rollout.max_sequences,
        },
        "update_share": chosen / best,
        "decode_share": decoding / fastest,
        "step_share": (generated / fastest + trained / best) / (generated / decoding + trained / max(1e-9, chosen)),
    }


# --- random runs


LETTERS = """
def letters(completions, **_):
    return [float(len(set(text))) for text in completions]
"""


def draw(numbers: random.Random, small: bool) -> dict[str, Any]:
    kv, size = numbers.choice([1, 2, 4]), numbers.choice([32, 64, 128])
    wide = 4 if small else 16
    config = {
        "hidden_size": 64 * numbers.randint(1, wide),
        "intermediate_size": 64 * numbers.randint(2, 3 * wide),
        "num_hidden_layers": numbers.randint(2, 4 if small else 16),
        "num_attention_heads": kv * numbers.choice([1, 2, 4]),
        "num_key_value_heads": kv,
        "head_dim": size,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": numbers.random() < 0.5,
    }
    learn = {
        "steps": 2,
        "prompts_per_step": numbers.randint(1, 4 if small else 32),
        "samples_per_prompt": numbers.randint(2, 4 if small else 16),
        "max_new_tokens": numbers.randint(4, 16 if small else 512),
        "kl": {"coef": numbers.choice([0.0, 0.01])},
        "seed": numbers.randint(0, 999),
    }
    return {
        "kind": numbers.choice(["llama", "qwen2", "qwen3", "mistral", "gemma2"]),
        "config": config,
        "learn": learn,
        "prompt": numbers.randint(4, 40 if small else 400),
        "rank": numbers.choice([0, 0, 8]),
        "limit": numbers.uniform(1.02, 4.0),
    }


def smallest(work: dict[str, Any], policy: Policy, device: torch.device) -> int:
    """Bytes of device memory that the leanest plan needs."""
    learn = work["learn"]
    job = Job(
        shape_of_model(policy.model),
        policy.dtype.itemsize,
        learn["prompts_per_step"],
        learn["samples_per_prompt"],
        work["prompt"] + 8,
        work["prompt"] + 8,
        learn["max_new_tokens"],
        fused=policy.fused,
        tiled_head=policy.tiled_head,
        reference=learn["kl"]["coef"] > 0,
        compared=learn["kl"]["coef"] > 0,
    )
    here = machine_here(device)
    tight = Machine(here.device, 1, here.host_memory, here.cores, cpu=here.cpu)
    plan = make_plan(Run(checkpoint_activations=True), job, tight)
    return plan.ledger.fullest.device_bytes


def one_run(
    work: dict[str, Any], folder: Path, tokenizer: Any, device: torch.device, gradients: bool
) -> dict[str, Any]:
    import trimtab

    config = AutoConfig.for_model(
        work["kind"], vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, **work["config"]
    )
    torch.manual_seed(work["learn"]["seed"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    found: dict[str, Any] = {"work": work}
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if device.type == "cuda":
        policy = Policy(model.to(device))
        fuse(policy)
        found["limit"] = int(work["limit"] * smallest(work, policy, device))
        del policy, model
        empty(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, found["limit"] / total))
    (folder / "reward.py").write_text(LETTERS)
    rows = [{"prompt": ("ab+1=" * 100)[: work["prompt"] - i % 3]} for i in range(64)]
    started = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trimtab.train(
                model={"path": str(folder / "model"), **({"lora": {"r": work["rank"]}} if work["rank"] else {})},
                data=rows,
                reward=f"{folder}/reward.py:letters",
                learn=work["learn"],
                run={"reward_workers": 1},
                observe={"dir": str(folder / "run"), "checkpoint_every": 0, "tensorboard": False},
            )
        metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        found |= {"outcome": "finished", "recoveries": metrics[-1]["run/oom_recoveries"]}
        ratios = [row["memory/predicted_over_measured"] for row in metrics if "memory/predicted_over_measured" in row]
        found["predicted_over_measured"] = ratios
    except ConfigError as refused:
        found |= {"outcome": "refused", "why": str(refused)[:300]}
    except Exception as failed:
        found |= {
            "outcome": "crashed",
            "why": f"{type(failed).__name__}: {failed}"[:500],
            "at": traceback.format_exc()[-1500:],
        }
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    found["seconds"] = time.monotonic() - started
    empty(device)
    if gradients and found["outcome"] == "finished":
        found["gradient_distance"] = gradient_distance(folder, work, device)
    return found


def gradient_distance(folder: Path, work: dict[str, Any], device: torch.device) -> float:
    """Of the step's gradient in the run's micro-batches from that in one, relative to its size."""
    from trimtab.config.load import load_config

    run = load_config(folder / "run" / "config.yaml", []).run
    learn, grads = work["learn"], []
    for budget, kept in ((run.token_budget, run.checkpoint_activations), (10**9, False)):
        policy = Policy(AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").to(device))
        fuse(policy)
        settings = resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1))
        updater = Updater(
            policy,
            PolicyGradient(settings),
            settings,
            token_budget=budget,
            score_token_budget=budget,
            logprob_chunk=run.logprob_chunk,
            checkpoint_activations=kept,
        )
        job = Job(
            shape_of_model(policy.model),
            2,
            4,
            learn["samples_per_prompt"],
            work["prompt"],
            work["prompt"],
            learn["max_new_tokens"],
        )
        samples = list(
            longest_samples(
                job, 4 * (work["prompt"] + learn["samples_per_prompt"] * learn["max_new_tokens"]), job.shape.vocabulary
            )
        )
        for batch in updater._micro_batches(samples, budget):
            updater._backward(updater._loss(batch, 0.0, _stats()))
        grads.append([g.detach().float().cpu() for g in updater.optimizer.grads() if g is not None])
        updater.abandon()
        empty(device)
    off = sum(((a - b) ** 2).sum() for a, b in zip(*grads, strict=True))
    return float((off / sum((b**2).sum() for b in grads[1])).sqrt())


def _stats() -> Any:
    from trimtab.update.updater import UpdateStats

    return UpdateStats()


def numbered_run(index: int, seed: int, small: bool) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from tiny import tiny_tokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        work = draw(random.Random(seed + index), small)
        return one_run(work, Path(folder), tiny_tokenizer(), device, index % 10 == 0) | {"index": index}


def write(found: list[dict[str, Any]], what: str, folder: Path) -> None:
    """After every run, so that a call that is cut off loses only what it had not come to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"tuning_{what}-{datetime.date.today()}.json").write_text(json.dumps(found, indent=1) + "\n")


def runs(count: int, seconds: float, processes: int, small: bool, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Each process has its own limit of memory. What has not begun after `seconds` is left out, and the count says so."""
    found, started, waiting = [], time.monotonic(), list(range(count))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while running or waiting:
            while waiting and len(running) < processes:
                running.add(pool.submit(numbered_run, waiting.pop(0), seed, small))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if time.monotonic() - started > seconds:
                waiting = []
            for row in (future.result() for future in done):
                found.append(row)
                write(found, "random", folder)
                facts = [
                    row["index"],
                    row["work"]["kind"],
                    row["outcome"],
                    row.get("recoveries", ""),
                    row.get("why", "")[:150],
                ]
                print(*facts, f"{row['seconds']:.1f} s", flush=True)
    return sorted(found, key=lambda row: int(row["index"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grid", "random"])
    parser.add_argument("--shapes", nargs="+", default=["smollm2", "0.5b"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=540, help="random: begin no run after so many")
    parser.add_argument("--processes", type=int, default=1, help="random: runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="random: sizes for a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[dict[str, Any]] = []
    if args.what == "grid":
        for shape in args.shapes:
            found.append(grid(shape, device, args.budgets, args.batches))
            print(
                {key: found[-1][key] for key in ("shape", "chosen", "update_share", "decode_share", "step_share")},
                flush=True,
            )
            write(found, "grid", args.out)
            empty(device)
    else:
        found = runs(args.runs, args.seconds, args.processes, args.small, args.seed, args.out)
        outcomes = [row["outcome"] for row in found]
        print(
            {name: outcomes.count(name) for name in set(outcomes)},
            "recoveries",
            sum(row.get("recoveries", 0) for row in found),
        )
        ratios = [ratio for row in found for ratio in row.get("predicted_over_measured", [])]
        if ratios:
            print(f"predicted over measured: {min(ratios):.3f} to {max(ratios):.3f}")
        print("gradient distances", [round(row["gradient_distance"], 5) for row in found if "gradient_distance" in row])


if __name__ == "__main__":
    main()
