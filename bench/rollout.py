"""Rollout speed: Trimtab's native engine and vLLM on one GPU, the same weights and the same requests, in one run of this file.

    python bench/rollout.py                                   # random 0.5b and 1.5b shapes, fixed and tail, both engines
    python bench/rollout.py --shapes 0.5b 1.5b 7b --engines trimtab vllm
    python bench/rollout.py --shapes --model smollm2.gguf --gsm8k train.jsonl   # real weights and prompts, natural stops
    python bench/rollout.py --engines trimtab --steps-only     # decode step times by batch size
    python bench/rollout.py --shapes 0.5b 1.5b 7b --together   # start all vLLM engines at once, measure one after the other

Workload R: 128 prompts of 128 random tokens, 8 samples each, temperature 1, log-prob of every sampled token returned, no stop
token. `fixed`: 512 new tokens each. `tail`: lengths lognormal(ln 256, 0.8), clipped to 16..1024 (numpy default_rng(0)). The 7b
shape runs `fixed` with 128 new tokens at 256 and at 1,024 sequences. Each engine runs in a fresh process; a call's time is wall
time from the requests to the last token on the host. Start-up is everything before the first measured call that a user waits
for: loading, compiling, capturing graphs, and the first small call.

The roofline of a workload: bytes that must move (weights once a step, keys and values of every token in view once a step, a
prompt's once for its samples) over the measured copy bandwidth, or operations over the measured matrix rate, whichever is longer,
for the products and for attention of every step.

Writes bench/results/rollout-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from roofline import ceilings, roofline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PROMPTS, PROMPT_TOKENS, SAMPLES = 128, 128, 8
MARK, READY = "RESULT ", "READY"
VLLM_KV_BYTES = {"0.5b": 20 * 2**30, "1.5b": 40 * 2**30, "7b": 24 * 2**30}
"""Room for the keys and values of every sequence of a workload at its longest, and more: vLLM never has to preempt."""
CONFIG_ONLY = ("7b",)
"""Shapes whose random weights are made in place by each engine instead of being written to disk and read again."""

SHAPES: dict[str, dict[str, int | bool]] = {
    "0.5b": {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip


# --- what is asked of both engines


def random_prompts(count: int) -> list[list[int]]:
    import random

    numbers = random.Random(0)
    return [[numbers.randrange(100, 140000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def tail_lengths() -> list[int]:
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(256), 0.8, PROMPTS * SAMPLES)
    return [int(n) for n in np.clip(drawn, 16, 1024)]


def workloads(shape: str) -> dict[str, tuple[list[list[int]], list[int]]]:
    """Name -> prompts, and the number of new tokens of each sample."""
    if shape == "7b":
        return {
            "fixed 256": (random_prompts(32), [128] * 32 * SAMPLES),
            "fixed 1024": (random_prompts(128), [128] * 128 * SAMPLES),
        }
    prompts = random_prompts(PROMPTS)
    return {"fixed": (prompts, [512] * PROMPTS * SAMPLES), "tail": (prompts, tail_lengths())}


def gsm8k_prompts(path: Path, folder: str, count: int = 64) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [json.loads(line)["question"] for line in path.read_text().splitlines()[:count]]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in questions
    ]


def make_model(shape: str, folder: Path) -> None:
    """Random weights in bfloat16, as a Hugging Face folder."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        max_position_embeddings=4096, eos_token_id=1, pad_token_id=0, bos_token_id=2, architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16", **SHAPES[shape],
    )  # fmt: skip
    config.save_pretrained(folder)
    if shape not in CONFIG_ONLY:
        import torch

        random_model(folder).save_pretrained(folder)
        torch.cuda.empty_cache()


def as_folder(model: Path, scratch: Path) -> Path:
    """A GGUF file as the Hugging Face folder that both engines read."""
    if model.suffix != ".gguf":
        return model
    import torch

    from trimtab.config.schema import Model
    from trimtab.model.load import load_model, load_tokenizer, save_model

    source = Model(path=str(model), dtype="bfloat16")
    save_model(load_model(source, torch.device("cpu")), load_tokenizer(source), scratch / model.stem)
    return scratch / model.stem


def random_model(folder: Path | str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


# --- Trimtab


def run_trimtab(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401  what a process imports is not the engine's start-up

    from trimtab.config.learn import Sampling
    from trimtab.config.schema import Model
    from trimtab.data.prompt import Prompt
    from trimtab.model.load import load_model
    from trimtab.model.policy import Policy
    from trimtab.rollout.engine import Request
    from trimtab.rollout.native.engine import NativeEngine

    started = time.perf_counter()
    if args.shape in CONFIG_ONLY:
        policy = Policy(random_model(args.folder))
    else:
        policy = Policy(load_model(Model(path=args.folder, dtype="bfloat16"), torch.device("cuda")))
    loaded = time.perf_counter()
    stops = [policy.config.eos_token_id] if args.gsm8k else []
    free = torch.cuda.mem_get_info()[0]
    engine = NativeEngine(
        policy, None, stops, kv_bytes=int(min(48 * 2**30, free * 0.6)), page_tokens=args.page_tokens,
        max_sequences=1024, prefill_tokens=16384,
    )  # fmt: skip
    built = time.perf_counter()

    def call(prompts: list[list[int]], limits: list[int], seed: int = 0) -> dict[str, Any]:
        samples = len(limits) // len(prompts)
        requests = [
            Request(Prompt(i, "", tokens), samples, limits[i * samples : (i + 1) * samples], Sampling(), seed, 0)
            for i, tokens in enumerate(prompts)
        ]
        engine.publish(seed)
        torch.cuda.synchronize()
        began = time.perf_counter()
        groups = list(engine.generate(requests))
        seconds = time.perf_counter() - began
        tokens = sum(len(t) for g in groups for t in g.trajectories)
        stats = engine.stats
        return {
            "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds, "steps": stats.decode_steps,
            "occupancy": stats.occupancy, "prefill_s": stats.prefill_s, "decode_s": stats.decode_s,
            "graph_steps": stats.graph_steps, "lengths": [len(t) for g in groups for t in g.trajectories],
            "groups": groups,
        }  # fmt: skip

    found: dict[str, Any] = {"path": engine.description}
    asked = {"gsm8k": (args.prompts, [512] * len(args.prompts) * 16)} if args.gsm8k else workloads(args.shape)
    first = next(iter(asked.values()))
    call(first[0], [min(64, n) for n in first[1]])
    found["start_up_s"] = time.perf_counter() - started
    gc.collect()
    gc.freeze()  # as a session does
    found["load_s"], found["build_s"] = loaded - started, built - loaded
    for name, (prompts, limits) in asked.items():
        if args.steps_only:
            call(prompts[:1], limits[:SAMPLES], seed=1)
            break
        call(prompts, limits, seed=1)  # graphs of every size this workload passes through
        runs = [call(prompts, limits, seed=2 + i) for i in range(args.repeats)]
        middle = statistics.median(r["seconds"] for r in runs)
        gap = logprob_gap(policy, runs[-1].pop("groups")[:8])
        found[name] = runs[-1] | {"seconds": middle, "tokens_per_s": runs[-1]["tokens"] / middle, "logprob_gap": gap}
        found[name]["all_seconds"] = [r["seconds"] for r in runs]
    found["steps_ms"] = step_times(engine, policy, args.step_batches)
    found["peak_gib"] = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 2**30
    found["ceilings"] = ceilings()
    return found


def step_times(engine: Any, policy: Any, batches: list[int], context: int = 325) -> dict[str, float]:
    """Milliseconds of one decode step by batch size, groups of eight, at `context` tokens or what the rows have room for."""
    import torch

    from trimtab.rollout.native.scheduler import PromptGroup, Sequence

    decoder, rows, page = engine._decoder, engine._rows, engine.pool.page_tokens
    context = min(context, rows.width * page - 60)
    found: dict[str, float] = {"context": context}
    for size in batches:
        if size > rows.count:
            continue
        groups = [PromptGroup(i, [1] * PROMPT_TOKENS, [400] * SAMPLES) for i in range(-(-size // SAMPLES))]
        pages = -(-(context + 40) // page)
        live = [Sequence(groups[i // SAMPLES], i % SAMPLES, i, row=i) for i in range(size)]
        for i, s in enumerate(live):
            common = PROMPT_TOKENS // page
            begin = (i // SAMPLES) * (common + SAMPLES * pages)
            own = begin + common + (i % SAMPLES) * pages
            s.pages = [*range(begin, begin + common), *range(own, own + pages - common)]
            s.stored = context
        with torch.no_grad():
            rows.start(live)
            rows.set_pages(live)
            rows.state.positions[: rows.count] = context
            rows.state.limits.fill_(10**9)
            decoder.run(live, 2)
            rows.state.generated.fill_(0)
            rows.state.positions[: rows.count] = context
            begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin_event.record()
            decoder.run(live, 20)
            end_event.record()
            end_event.synchronize()
        found[str(size)] = begin_event.elapsed_time(end_event) / 20
        rows.state.done.fill_(1)
    decoder._served = []
    return found


def logprob_gap(policy: Any, groups: list[Any]) -> float:
    """Mean |engine - trainer| over the sampled tokens, the trainer's from its packed forward, in nats."""
    import torch

    from trimtab.model.packed import PackedPlan

    gaps = []
    with torch.no_grad():
        for group in groups:
            for t in group.trajectories:
                whole = torch.cat((torch.tensor(group.prompt.tokens), t.tokens)).cuda()
                plan = PackedPlan([len(whole)], "cuda")
                hidden = policy.hidden(whole, plan.positions, plan)[len(group.prompt.tokens) - 1 : -1]
                stats = policy.head.token_stats(hidden, t.tokens.cuda(), 1.0, 1024)
                gaps.append((stats.logprobs.cpu() - t.logprobs).abs())
    return float(torch.cat(gaps).mean())


# --- vLLM


def run_vllm(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    scheduling = {} if args.async_scheduling is None else {"async_scheduling": args.async_scheduling}
    llm = LLM(
        model=args.folder, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.25, max_num_seqs=1024,
        kv_cache_memory_bytes=VLLM_KV_BYTES.get(args.shape, 20 * 2**30), max_num_batched_tokens=args.batched_tokens,
        enable_prefix_caching=True, skip_tokenizer_init=not args.gsm8k, disable_log_stats=True,
        load_format="dummy" if args.shape in CONFIG_ONLY else "auto", **scheduling,
    )  # fmt: skip
    found: dict[str, Any] = {"start_up_s": time.perf_counter() - started}
    found["settings"] = {"batched_tokens": args.batched_tokens, "async_scheduling": args.async_scheduling}

    def call(prompts: list[list[int]], limits: list[int], together: bool, logprobs: int | None = 0) -> dict[str, Any]:
        samples = len(limits) // len(prompts)
        common = {"temperature": 1.0, "ignore_eos": not args.gsm8k, "logprobs": logprobs, "flat_logprobs": True,
                  "detokenize": False}  # fmt: skip
        if together:
            requests = [{"prompt_token_ids": p} for p in prompts]
            params = [SamplingParams(n=samples, max_tokens=limits[i * samples], **common) for i in range(len(prompts))]
        else:
            requests = [{"prompt_token_ids": p} for p in prompts for _ in range(samples)]
            params = [SamplingParams(max_tokens=n, **common) for n in limits]
        began = time.perf_counter()
        done = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = [len(o.token_ids) for r in done for o in r.outputs]
        return {"tokens": sum(lengths), "seconds": seconds, "tokens_per_s": sum(lengths) / seconds, "lengths": lengths}

    print(READY, flush=True)
    sys.stdin.readline()
    asked = {"gsm8k": (args.prompts, [512] * len(args.prompts) * 16)} if args.gsm8k else workloads(args.shape)
    first = next(iter(asked.values()))
    call(first[0], [min(64, n) for n in first[1]], False)
    for name, (prompts, limits) in asked.items():
        runs = {"one request a sample": call(prompts, limits, False)}
        samples = len(limits) // len(prompts)
        if args.variants and all(len(set(limits[i : i + samples])) == 1 for i in range(0, len(limits), samples)):
            runs["n in one request"] = call(prompts, limits, True)
            runs["without log-probs"] = call(prompts, limits, False, None)
        fair = {k: r for k, r in runs.items() if k != "without log-probs"}
        best = min(fair, key=lambda k: fair[k]["seconds"])
        found[name] = {**fair[best], "how": best, "variants": {k: r["tokens_per_s"] for k, r in runs.items()}}
    return found


# --- the run


class Worker:
    """One engine in a process of its own; vLLM says when it has started and waits to be asked."""

    def __init__(self, engine: str, python: str, extra: list[str], log: Path) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "PYTHONUNBUFFERED": "1",
        }
        command = [python, __file__, "--worker", engine, *extra]
        self.engine, self.log = engine, log
        self._ready = engine != "vllm"
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"), text=True
        )

    def wait_until_ready(self) -> None:
        while not self._ready:
            self._ready = self._line().strip() == READY

    def measure(self) -> dict[str, Any]:
        self.wait_until_ready()
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        while not (line := self._line()).startswith(MARK):
            pass
        self._process.wait()
        return json.loads(line[len(MARK) :])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            print(self.log.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"{self.engine} ended with exit code {self._process.wait()}")
        return line


def table(results: dict[str, Any]) -> str:
    lines = [
        "| shape | workload | engine | tokens/s | against vLLM | of the roofline | start-up, s | log-prob gap, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, engines in results["shapes"].items():
        names = [k for k, v in engines["trimtab"].items() if isinstance(v, dict) and "tokens_per_s" in v]
        for name in names:
            for engine in engines:
                found = engines[engine].get(name)
                if found is None:
                    continue
                peer = engines.get("vllm", {}).get(name)
                ratio = f"{found['tokens_per_s'] / peer['tokens_per_s']:.2f}x" if peer else "-"
                gap = found.get("logprob_gap")
                share = f"{found['roofline_s'] / found['seconds']:.0%}" if "roofline_s" in found else "-"
                lines.append(
                    f"| {shape} | {name} | {engine} | {found['tokens_per_s']:,.0f} | {ratio} "
                    f"| {share} | {engines[engine]['start_up_s']:.1f} "
                    f"| {f'{gap:.4f}' if gap is not None else '-'} |"
                )
    lines += ["", "Decode step of the native engine, ms:", ""]
    for shape, engines in results["shapes"].items():
        steps = dict(engines["trimtab"]["steps_ms"])
        at = f"- {shape}, context {steps.pop('context'):.0f}: "
        lines.append(at + ", ".join(f"batch {b}: {ms:.2f}" for b, ms in steps.items()))
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["0.5b", "1.5b"], choices=SHAPES)
    parser.add_argument("--engines", nargs="+", default=["trimtab", "vllm"])
    parser.add_argument("--model", help="a Hugging Face folder with real weights, for --gsm8k")
    parser.add_argument("--gsm8k", help="GSM8K as JSON lines with a question each")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--variants", action="store_true", help="also vLLM with n in one request and without log-probs")
    parser.add_argument("--async-scheduling", type=lambda x: x == "true", default=None)
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="start every vLLM engine at once to save time")
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--step-batches", type=int, nargs="*", default=[8, 64, 256, 512, 1024])
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--worker", choices=["trimtab", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def passed_on(args: argparse.Namespace) -> list[str]:
    """What a worker is told besides its model."""
    passed = ["--repeats", str(args.repeats), "--page-tokens", str(args.page_tokens)]
    passed += ["--batched-tokens", str(args.batched_tokens), "--step-batches", *map(str, args.step_batches)]
    passed += ["--variants"] * args.variants + ["--steps-only"] * args.steps_only
    if args.async_scheduling is not None:
        passed += ["--async-scheduling", str(args.async_scheduling).lower()]
    return passed


def measure(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Every engine on every model: vLLM's first, one after the other, then Trimtab's."""
    scratch = Path(tempfile.mkdtemp(prefix="rollout-"))
    jobs = {shape: (scratch / shape, ["--shape", shape]) for shape in args.shapes}
    for shape, (folder, _) in jobs.items():
        make_model(shape, folder)
    if args.gsm8k:
        jobs[Path(args.model).stem] = (as_folder(Path(args.model), scratch), ["--gsm8k", args.gsm8k])

    def start(engine: str, name: str) -> Worker:
        folder, extra = jobs[name]
        python = args.vllm_python if engine == "vllm" else sys.executable
        return Worker(engine, python, ["--folder", str(folder), *extra, *passed_on(args)], log)

    started = {name: start("vllm", name) for name in jobs} if args.together and "vllm" in args.engines else {}
    for held in started.values():
        held.wait_until_ready()
    found: dict[str, Any] = {name: {} for name in jobs}
    for engine in sorted(args.engines, reverse=True):
        for name in jobs:
            worker = started.pop(name, None) or start(engine, name)
            found[name] = {engine: worker.measure(), **found[name]}
            print(name, engine, summary(found[name][engine]), flush=True)
    for name, (folder, _) in jobs.items():
        add_rooflines(found[name], json.loads((folder / "config.json").read_text()))
    return found


def main() -> None:
    args = arguments()
    if args.worker:
        args.prompts = gsm8k_prompts(Path(args.gsm8k), args.folder) if args.gsm8k else []
        found = run_trimtab(args) if args.worker == "trimtab" else run_vllm(args)
        print(MARK + json.dumps(found))
        return
    import torch
    import transformers

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "date": datetime.date.today().isoformat(), "machine": torch.cuda.get_device_name(), "torch": torch.__version__,
        "transformers": transformers.__version__, "shapes": measure(args, out / "rollout.log"),
    }  # fmt: skip
    stem = out / f"rollout-{results['date']}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    stem.with_suffix(".md").write_text(report(results))
    print(table(results))


def report(results: dict[str, Any]) -> str:
    where = f"{results['machine']}, torch {results['torch']}, transformers {results['transformers']}, {results['date']}"
    return f"{where}\n\n{table(results)}\n"


def add_rooflines(engines: dict[str, Any], config: dict[str, Any]) -> None:
    measured = engines.get("trimtab", {}).get("ceilings")
    for found in engines.values():
        for name, run in found.items():
            if isinstance(run, dict) and "lengths" in run:
                lengths = run.pop("lengths")
                samples = 16 if name == "gsm8k" else SAMPLES
                if measured and name != "gsm8k":
                    run["roofline_s"] = roofline(config, lengths, PROMPT_TOKENS, samples, measured)
                run["tokens_mean"] = sum(lengths) / len(lengths)


def summary(found: dict[str, Any]) -> str:
    speeds = {k: round(v["tokens_per_s"]) for k, v in found.items() if isinstance(v, dict) and "tokens_per_s" in v}
    facts = {name: found[name] for name in ("path", "start_up_s", "steps_ms") if name in found}
    return json.dumps({**speeds, **facts})


if __name__ == "__main__":
    main()
