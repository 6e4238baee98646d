"""Is memory known before it is used? Predicted against measured peaks of rollout and update, over many configurations.

    python bench/memory.py                       # 27 configurations on the CUDA device, one after the other; some minutes
    python bench/memory.py --only smollm2 7b     # those whose name contains a word
    python bench/memory.py --processes 3         # several at a time: each process has a meter of its own
    python bench/memory.py --tiny                # two small shapes; on a CPU, where there is no meter, it shows that it runs

Models of 0.1 to 7.6B random parameters in bfloat16, whole or with adapters of rank 16; activations kept, in part or recomputed;
three budgets. Each is planned with those keys pinned, and then run: a rollout of 256 sequences, and an optimizer step on two full
micro-batches of the longest sequences. `analytic` is the ledger's figure from the config alone; `probed` has the update's work
corrected by two small micro-batches measured on the device before. Measured is torch's peak of allocated bytes and the rollout
arena beside it. Goal M: median |error| at most 3 %, worst 8 %, none more than 2 % too low.

Writes DIR/memory-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn, Sampling
from trimtab.config.run import Run
from trimtab.config.schema import Lora
from trimtab.data.prompt import Prompt
from trimtab.model.adapters import add_adapters
from trimtab.model.kernel_choice import fuse
from trimtab.model.policy import Policy
from trimtab.plan.job import NO_CORRECTION, Job
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.watch import PlanWatch
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run.calibrate import probe
from trimtab.run.machine import machine_here
from trimtab.run.shapes import shape_of_model
from trimtab.run.tuner import longest_samples
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

GIB = 2**30
SHAPES = {
    "smollm2": "smollm2-135m",
    "0.5b": "qwen2.5-0.5b",
    "1.5b": "qwen2.5-1.5b",
    "qwen3-1.7b": "qwen3-1.7b",
    "llama-1b": "llama-3.2-1b",
    "7b": "qwen2.5-7b",
}
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Case:
    shape: str
    rank: int
    kept: bool | str
    budget: int

    @property
    def name(self) -> str:
        kept = {False: "all kept", "some": "some", True: "recomputed"}[self.kept]
        return f"{self.shape}, {'LoRA' if self.rank else 'full'}, {kept}, {self.budget // 1024}k"


def cases() -> list[Case]:
    small = [Case(s, 0, k, b) for s, k, b in product(("smollm2", "0.5b"), (False, "some", True), (8192, 16384, 32768))]
    middle = [Case("1.5b", 0, "some", 16384), Case("1.5b", 16, False, 8192), Case("qwen3-1.7b", 0, True, 16384)]
    middle += [
        Case("qwen3-1.7b", 16, "some", 8192),
        Case("llama-1b", 0, False, 8192),
        Case("llama-1b", 16, True, 32768),
    ]
    return [*small, *middle, Case("7b", 16, True, 8192), Case("7b", 16, "some", 8192), Case("7b", 16, True, 16384)]


def build(case: Case, device: torch.device) -> Policy:
    config = dict(TINY if case.shape == "tiny" else WELL_KNOWN[SHAPES[case.shape]]) | {"max_position_embeddings": 8192}
    kind = config.pop("model_type")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=dtype)
    if case.rank:
        model = add_adapters(model, Lora(r=case.rank), seed=0)
    policy = Policy(model)
    fuse(policy)
    return policy


def plan_of(case: Case, policy: Policy, device: torch.device) -> Plan:
    adapters = sum(p.numel() for p in policy.parameters()) if case.rank else 0
    job = Job(
        shape_of_model(policy.model),
        policy.dtype.itemsize,
        prompts=32,
        samples=8,
        longest_prompt=256,
        typical_prompt=256,
        completion=512,
        rank=case.rank,
        adapters=adapters,
        fused=policy.fused,
        tiled_head=policy.tiled_head,
    )
    return make_plan(Run(token_budget=case.budget, checkpoint_activations=case.kept), job, machine_here(device), "max")


class Meter:
    """Peak of allocated bytes since the last reset, with the arena; 0 where there is no meter."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def reset(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peak(self, outside: int = 0) -> int:
        return torch.cuda.max_memory_allocated() + outside if self._cuda else 0


def rollout(engine: NativeEngine, job: Job, meter: Meter) -> int:
    numbers = torch.Generator().manual_seed(0)
    words = torch.randint(3, job.shape.vocabulary, (job.prompts, job.typical_prompt), generator=numbers).tolist()
    requests = [Request(Prompt(i, "", row), job.samples, 64, Sampling(), 0, 0) for i, row in enumerate(words)]
    meter.reset()
    for _ in engine.generate(requests):
        pass
    return meter.peak(engine.non_torch_bytes)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    meter = Meter(device)
    policy = build(case, device)
    plan = plan_of(case, policy, device)
    run, job = plan.run, plan.job
    engine = NativeEngine(
        policy,
        None,
        [],
        kv_bytes=run.rollout.kv_memory,
        page_tokens=run.rollout.page_tokens,
        max_sequences=run.rollout.max_sequences,
        prefill_tokens=run.rollout.prefill_tokens,
        prefix_cache=False,
        lend_memory=bool(run.rollout.lend_memory),
    )
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn(steps=1))),
        resolve(Learn(steps=1)),
        token_budget=case.budget,
        score_token_budget=case.budget,
        logprob_chunk=run.logprob_chunk,
        checkpoint_activations=case.kept,
        offload_optimizer=run.offload.optimizer,
        offload_activations=run.offload.activations,
    )
    engine.publish(0)
    rolled = rollout(engine, job, meter)
    engine.lend()
    line = probe(updater, job, run) if device.type == "cuda" else NO_CORRECTION
    samples = [s for _ in range(2) for s in longest_samples(job, case.budget, job.shape.vocabulary)]
    meter.reset()
    stats = updater.step(samples, 1e-6, 0.0)
    updated = meter.peak()
    watch = PlanWatch(plan)
    watch.saw(stats.sizes, case.kept, run.logprob_chunk, bool(run.offload.activations))
    predicted = watch.update_bytes(stats.sizes)
    probed = PlanWatch(replace(plan, job=replace(job, correction=line)))
    probed.saw(stats.sizes, case.kept, run.logprob_chunk, bool(run.offload.activations))
    found = {
        "case": case.name,
        "path": policy.description,
        "microbatches": len(stats.sizes),
        "rollout": {"measured": rolled, "analytic": plan.ledger["rollout"].allocated},
        "update": {"measured": updated, "analytic": predicted, "probed": probed.update_bytes(stats.sizes)},
        "probe": asdict(line),
        "settings": asdict(case),
    }
    engine.close()
    return found


def measured_or_why_not(case: Case) -> dict[str, Any] | str:
    """In a process of its own, so that no configuration sees what another has left; what went wrong as words."""
    try:
        return measure(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, ConfigError) as failed:
        traceback.print_exc()
        return f"{type(failed).__name__}: {failed}"[:500]


def error(found: dict[str, int], key: str) -> float:
    return found[key] / found["measured"] - 1


def report(found: list[dict[str, Any]], machine: str) -> str:
    today = datetime.date.today()
    lines = [
        f"# Memory, predicted and measured, {today}, {machine}",
        "",
        "Peak allocated, GiB; error of the prediction.",
        "",
    ]
    lines += [
        "| configuration | rollout | predicted | error | update | analytic | error | probed | error |",
        "|---|" + "---|" * 8,
    ]
    for row in found:
        cells = []
        for phase, keys in (("rollout", ["analytic"]), ("update", ["analytic", "probed"])):
            cells.append(f"{row[phase]['measured'] / GIB:.2f}")
            for key in keys:
                cells += [f"{row[phase][key] / GIB:.2f}", f"{error(row[phase], key):+.1%}"]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    lines.append("")
    for phase, key in (("rollout", "analytic"), ("update", "analytic"), ("update", "probed")):
        errors = [error(row[phase], key) for row in found]
        lines.append(
            f"- {phase}, {key}: median |error| {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, "
            f"lowest {min(errors):+.1%}, over {len(errors)} configurations"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a configuration's name must contain one of")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--processes", type=int, default=1, help="configurations at a time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [Case("tiny", 0, False, 2048), Case("tiny", 4, True, 1024)] if args.tiny else cases()
    chosen = [case for case in chosen if not args.only or any(word in case.name for word in args.only)]
    found = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        for case, row in zip(chosen, pool.map(measured_or_why_not, chosen), strict=True):
            if isinstance(row, str):
                print(f"{case.name}: {row}", flush=True)
                continue
            found.append(row)
            sizes = {phase: {k: round(v / GIB, 3) for k, v in row[phase].items()} for phase in ("rollout", "update")}
            print(row["case"], sizes, flush=True)
            if device.type == "cuda":
                write(found, args.out)
    if device.type != "cuda":
        print("no meter on this device: nothing is written")
        return
    print(report(found, torch.cuda.get_device_name()))


def write(found: list[dict[str, Any]], folder: Path) -> None:
    """After every configuration, so that a call that is cut off loses only what it had not come to."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"memory-{datetime.date.today()}"
    name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    name.with_suffix(".md").write_text(report(found, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
