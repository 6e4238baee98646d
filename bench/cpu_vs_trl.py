"""Trimtab and TRL on the CPU: the same tiny model, data and GRPO settings, end to end, in one run of this file.

    python bench/cpu_vs_trl.py                            # makes build/trl-venv with pip, then measures
    python bench/cpu_vs_trl.py --trl-python /venv/bin/python --only equal spread
    python bench/cpu_vs_trl.py --sweep                    # TRL's settings only: how its side was chosen

Three workloads. `equal`: every completion has the same length, TRL's best case. `spread`: lengths spread over more than ten
times. `learning`: sorting digits from a shared warm start, for the reward curves. Both sides run as fresh processes with the same
number of threads, alternately (A B A B ...), on the same prompts in the same order. A step's seconds are wall time from the end
of one step to the end of the next, with everything that a step does in them; the first two and the last are left out (warm-up,
final checkpoint). Tokens are completion tokens up to and including the stop token, counted after generation.

Writes bench/results/cpu_vs_trl-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BUILD = ROOT / "build"
TRL_VERSION = "1.16.0"
SIDES = ("trimtab", "trl")
SKIP_FIRST, SKIP_LAST = 2, 1
TRIES, DISTURBED, LIMIT_S = 3, 0.1, 600
"""A run during which other processes had more than this share of the cores is done again, at most so many times in all."""

# --- what is run: everything that changes the result is here once and used by both sides

WORKLOADS: dict[str, dict[str, Any]] = {
    "equal": {
        "what": "every completion has 48 tokens",
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "max_new_tokens": 48,
        "lr": 1e-6,
        "reward": "vowels",
        "steps": 9,
        "seeds": [0, 1],
        "trl": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2},
    },
    "spread": {
        "what": "lengths lognormal(ln 64, 0.8), clipped to 8..256",
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "max_new_tokens": 256,
        "lr": 1e-6,
        "reward": "vowels",
        "steps": 8,
        "seeds": [0, 1],
        "trl": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 2},
    },
    "learning": {
        "what": "sorting eight digits, from a shared warm start",
        "prompts_per_step": 64,
        "samples_per_prompt": 8,
        "max_new_tokens": 10,
        "lr": 2e-4,
        "reward": "right",
        "steps": 60,
        "seeds": [0, 1],
        "trl": {"per_device_train_batch_size": 512, "gradient_accumulation_steps": 1},
    },
}

# TRL's settings that do not change what is learned, tried one by one by --sweep. What won on `equal` is in WORKLOADS.
TRL_SWEEP: dict[str, dict[str, Any]] = {
    **{
        f"batch {size} x {128 // size}": {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": 128 // size,
        }
        for size in (128, 64, 32, 16, 8)
    },
    "plain AdamW": {"optim": "adamw_torch"},
    "eager attention": {"model_init_kwargs": {"attn_implementation": "eager"}},
    "static KV cache": {"cache_implementation": "static"},
    "continuous batching": {"use_transformers_continuous_batching": True},
    "torch.compile": {"torch_compile": True},
}


def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """A reward that costs nothing to compute: the share of vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer)]


# --- models and rows, made once with Trimtab's own warm start and then only read, by both sides


def prepare(name: str, folder: Path) -> None:
    """A model folder and rows.json for one workload."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab import demo
    from trimtab.data.tasks import TASKS
    from trimtab.model.load import save_model
    from trimtab.model.policy import Policy

    tokenizer = demo.build_tokenizer()
    draw = random.Random(0)
    if name == "learning":
        rows = TASKS["sort"].generate(4096, 8, 0, "train")
        policy = Policy(demo.build_model(tokenizer, seed=0))
        demo.warm_start(policy, tokenizer, rows, 60)
        model = policy.model
    else:
        if name == "equal":
            # The last id is the tokenizer's end and has no row in the head, so that no completion can stop.
            tokenizer.add_special_tokens({"eos_token": "<end>"})
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(demo.SPECIAL_TOKENS) + len(demo.CHARACTERS),
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=5,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=512,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
        rows = [
            {"prompt": f"write {_letters(draw, 8)}: ", "answer": _letters(draw, _length(draw))} for _ in range(2048)
        ]
        if name == "spread":
            demo.warm_start(Policy(model), tokenizer, rows, 100, batch=48, lr=1e-3)
    save_model(model, tokenizer, folder)
    (folder / "rows.json").write_text(json.dumps([{k: r[k] for k in ("prompt", "answer")} for r in rows]))


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def _length(draw: random.Random) -> int:
    return round(min(255, max(7, draw.lognormvariate(4.16, 0.8))))


# --- one side, in its own process: prints one JSON line {seconds, tokens, rewards, lengths, phases, versions}


def run_trimtab(work: dict[str, Any], folder: Path, seed: int, out: Path, threads: int) -> dict[str, Any]:
    import torch
    import transformers
    from peers import ADAMW

    import trimtab

    trimtab.train(
        {"data": {"shuffle": False}},
        model=str(folder),
        data=json.loads((folder / "rows.json").read_text()),
        reward=f"{__file__}:{work['reward']}",
        learn={
            "algorithm": "grpo",
            "seed": seed,
            "optimizer": ADAMW,
            "max_grad_norm": 1.0,
            **{k: work[k] for k in ("steps", "prompts_per_step", "samples_per_prompt", "max_new_tokens", "lr")},
        },
        run={"device": "cpu", "threads": threads, **work.get("run", {})},
        observe={"dir": str(out), "checkpoint_every": 0, "samples_every": 0, "tensorboard": False},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    phases = ("rollout", "reward", "score", "update", "publish", "idle")
    return {
        "seconds": [row["time/total"] for row in rows],
        "tokens": [row["rollout/tokens"] for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
        "phases": {name: [row[f"time/{name}"] for row in rows] for name in phases},
        "versions": {
            "trimtab": trimtab.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def run_trl(work: dict[str, Any], folder: Path, seed: int, out: Path, threads: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    import transformers
    import trl
    from datasets import Dataset
    from peers import trl_settings
    from transformers import TrainerCallback

    rewards: list[float] = []
    tokens: list[int] = []
    lengths: list[int] = []
    ends: list[float] = []
    generate_s: list[float] = []
    score = globals()[work["reward"]]

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        values: list[float] = score(prompts, completions, **columns)
        rewards.append(sum(values) / len(values))
        tokens.append(sum(map(len, completion_ids)))
        lengths.extend(map(len, completion_ids))
        return values

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            made = super()._generate(*args, **kwargs)
            generate_s.append(time.perf_counter() - started)
            return made

    settings = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "seed": seed,
        **trl_settings(work, work["steps"]),
        **work["trl"],
    }
    init = {"dtype": "float32", **settings.pop("model_init_kwargs", {})}
    trainer = Trainer(
        model=str(folder),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings, model_init_kwargs=init),
        train_dataset=Dataset.from_list(json.loads((folder / "rows.json").read_text())),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "seconds": [b - a for a, b in itertools.pairwise(ends)],
        "tokens": tokens,
        "rewards": rewards,
        "lengths": sorted(lengths),
        "phases": {"rollout": generate_s},
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


# --- the whole comparison


def call(python: str, side: str, work: dict[str, Any], folder: Path, seed: int, threads: int) -> dict[str, Any]:
    """Run one side in a fresh process and return what it measured; once more if other processes took part of the machine."""
    tries = []
    for _ in range(TRIES):
        tries.append(_call(python, side, work, folder, seed, threads))
        if tries[-1]["others"] < DISTURBED:
            break
    return min(tries, key=lambda run: run["others"])


def _call(python: str, side: str, work: dict[str, Any], folder: Path, seed: int, threads: int) -> dict[str, Any]:
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "GOMP_SPINCOUNT": "30000",  # Trimtab's own setting; both sides lose less to neighbours with it
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory(prefix=f"trimtab-bench-{side}-") as scratch:
        spec = Path(scratch) / "spec.json"
        answer = Path(scratch) / "answer.json"
        spec.write_text(
            json.dumps({"work": work, "folder": str(folder), "seed": seed, "out": f"{scratch}/run", "threads": threads})
        )
        busy, mine, started = _busy_seconds(), _child_seconds(), time.monotonic()
        command = [python, __file__, "--worker", side, str(spec), str(answer)]
        try:
            done = subprocess.run(command, env=env, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{side}: stopped after {LIMIT_S} s") from None
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        machine_s = (time.monotonic() - started) * len(os.sched_getaffinity(0))
        others = max(0.0, (_busy_seconds() - busy) - (_child_seconds() - mine)) / machine_s
        return {**json.loads(answer.read_text()), "seed": seed, "others": round(others, 3)}


def _busy_seconds() -> float:
    """CPU seconds that everything on this machine has used; 0 where that is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def steady(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The median step of some runs, without their first and last steps."""
    seconds, tokens, rollout = (
        [x for run in runs for x in (run["phases"]["rollout"] if k == "rollout" else run[k])[SKIP_FIRST:-SKIP_LAST]]
        for k in ("seconds", "tokens", "rollout")
    )
    return {
        "tokens_per_s": statistics.median(t / s for t, s in zip(tokens, seconds)),
        "tokens_per_s_mean": sum(tokens) / sum(seconds),
        "step_s": statistics.median(seconds),
        "rollout_s": statistics.median(rollout),
        "tokens_a_step": statistics.mean(tokens),
    }


def compare(name: str, pythons: dict[str, str], threads: int, rounds: int) -> dict[str, Any]:
    """All runs of one workload, sides taking turns."""
    work, folder = WORKLOADS[name], model_folder(name, pythons["trimtab"], threads)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            run = call(pythons[side], side, work, folder, work["seeds"][number % len(work["seeds"])], threads)
            runs[side].append(run)
            rate = steady([run])
            shown = f"{rate['tokens_per_s']:.0f} tokens/s, {rate['step_s']:.2f} s a step, others {run['others']:.0%}"
            print(f"  {name} {side}: {shown}", flush=True)
    median = {side: steady(runs[side]) for side in SIDES}
    return {
        "what": work["what"],
        "settings": work,
        "median": median,
        "speedup": median["trimtab"]["tokens_per_s"] / median["trl"]["tokens_per_s"],
        "runs": runs,
    }


def sweep(pythons: dict[str, str], threads: int) -> dict[str, Any]:
    """TRL alone under each of TRL_SWEEP; a setting that does not run is reported as such."""
    found: dict[str, Any] = {}
    for name in ("equal", "spread"):
        folder = model_folder(name, pythons["trimtab"], threads)
        for label, settings in TRL_SWEEP.items():
            work = {
                **WORKLOADS[name],
                "steps": 5 if name == "spread" else 7,
                "trl": {**WORKLOADS[name]["trl"], **settings},
            }
            try:
                run = call(pythons["trl"], "trl", work, folder, 0, threads)
                found[f"{name}, {label}"] = rate = {**steady([run]), "others": run["others"]}
                print(
                    f"  TRL {name}, {label}: {rate['tokens_per_s']:.0f} tokens/s, others {run['others']:.0%}",
                    flush=True,
                )
            except SystemExit as error:
                found[f"{name}, {label}"] = {"failed": str(error).strip().splitlines()[-1]}
                print(f"  TRL {name}, {label}: {found[f'{name}, {label}']['failed']}", flush=True)
    return found


def model_folder(name: str, python: str, threads: int) -> Path:
    """The workload's model, made on first use."""
    folder = BUILD / "bench-models" / name
    if not (folder / "rows.json").exists():
        print(f"  making the model of {name} (once)", flush=True)
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([python, __file__, "--prepare", name, str(folder)], check=True, env=env)
    return folder


def trl_python(given: str | None) -> str:
    """The given interpreter, or that of build/trl-venv, which is made if need be with the torch and transformers used here."""
    if given:
        return given
    from importlib.metadata import version

    python = BUILD / "trl-venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        wanted = [f"trl=={TRL_VERSION}"]
        wanted += [f"{package}=={version(package).split('+')[0]}" for package in ("torch", "transformers")]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
    return str(python)


def machine() -> dict[str, Any]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    versions = {k: v for side in reversed(SIDES) for k, v in report["versions"][side].items()}
    lines = [
        f"# Trimtab and TRL on the CPU, {report['date']}",
        "",
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {report['threads']} threads a side; "
        + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())),
        "",
        "Completion tokens per second, end to end (rollout, reward, update), of the median step; the first two steps and the "
        "last of each run are left out. In brackets the median step of the slowest and of the fastest run.",
        "",
        "| workload | tokens a step, TRL / Trimtab | TRL tokens/s | Trimtab tokens/s | Trimtab ÷ TRL "
        "| s a step, TRL (generation) | s a step, Trimtab (generation) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in report["workloads"].items():
        ours, theirs = result["median"]["trimtab"], result["median"]["trl"]
        rates = {side: [steady([run])["tokens_per_s"] for run in result["runs"][side]] for side in SIDES}
        shown = {
            side: f"{result['median'][side]['tokens_per_s']:,.0f} ({min(r):,.0f}–{max(r):,.0f})"
            for side, r in rates.items()
        }
        lines.append(
            f"| {name}: {result['what']} | {theirs['tokens_a_step']:,.0f} / {ours['tokens_a_step']:,.0f} | {shown['trl']} | "
            f"{shown['trimtab']} | **{result['speedup']:.2f}** | {theirs['step_s']:.2f} ({theirs['rollout_s']:.2f}) | "
            f"{ours['step_s']:.2f} ({ours['rollout_s']:.2f}) |"
        )
    for name, result in report["workloads"].items():
        lengths = sorted(n for run in result["runs"]["trl"] for n in run["lengths"])
        at = {q: lengths[min(len(lengths) - 1, int(q * len(lengths)))] for q in (0.0, 0.05, 0.5, 0.95, 1.0)}
        lines += [
            "",
            f"Completion lengths of {name} (TRL's; min, 5 %, median, 95 %, max): {', '.join(map(str, at.values()))}.",
        ]
    if "learning" in report["workloads"]:
        runs = report["workloads"]["learning"]["runs"]
        for side in SIDES:
            ends = [(sum(r["rewards"][:5]) / 5, sum(r["rewards"][-5:]) / 5) for r in runs[side]]
            shown_ends = "; ".join(f"{a:.3f} → {b:.3f}" for a, b in ends)
            lines += ["", f"Learning, {side}: mean reward of the first and last five steps, by seed: {shown_ends}."]
        lines += ["", f"![learning curves](cpu_vs_trl-{report['date']}.png)"]
    if report.get("sweep"):
        lines += ["", "TRL's settings tried:", "", "| setting | tokens/s | s a step |", "|---|---|---|"]
        for label, rate in report["sweep"].items():
            shown_rate = (
                f"{rate['tokens_per_s']:,.0f} | {rate['step_s']:.2f}" if "step_s" in rate else f"{rate['failed']} |"
            )
            lines.append(f"| {label} | {shown_rate} |")
    return "\n".join(lines) + "\n"


def draw_curves(result: dict[str, Any], out: Path) -> None:
    """Reward over steps and over seconds, both sides, all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for side, color in zip(SIDES, ("#0072b2", "#d55e00")):
        for number, run in enumerate(result["runs"][side]):
            label = {"trimtab": "Trimtab", "trl": f"TRL {TRL_VERSION}"}[side] if number == 0 else None
            clock = [sum(run["seconds"][: i + 1]) for i in range(len(run["seconds"]))]
            style = {
                "color": color,
                "linewidth": 1.5,
                "alpha": 0.8,
                "label": label,
                "linestyle": ("-", "--")[number % 2],
            }
            by_step.plot(range(1, len(clock) + 1), run["rewards"], **style)
            by_time.plot(clock, run["rewards"], **style)
    by_step.set(xlabel="step", ylabel="mean reward", title="GRPO on sorting digits, same warm start")
    by_time.set(xlabel="seconds", title="the same, over wall time")
    by_step.legend(frameon=False)
    for axis in (by_step, by_time):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6")
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", help="interpreter with TRL; default: build/trl-venv, made with pip")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side and workload")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--sweep", action="store_true", help="try TRL's settings instead of comparing")
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "SPEC", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare[0], Path(args.prepare[1]))
        return
    if args.worker:
        side, spec, answer = args.worker
        given = json.loads(Path(spec).read_text())
        run = {"trimtab": run_trimtab, "trl": run_trl}[side]
        measured = run(given["work"], Path(given["folder"]), given["seed"], Path(given["out"]), given["threads"])
        Path(answer).write_text(json.dumps(measured))
        return
    pythons = {"trimtab": sys.executable, "trl": trl_python(args.trl_python)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    if args.sweep:
        found = sweep(pythons, args.threads)
        (RESULTS / f"trl_settings_cpu-{date}.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    report: dict[str, Any] = {"date": date, "machine": machine(), "threads": args.threads, "workloads": {}}
    for name in args.only:
        report["workloads"][name] = compare(name, pythons, args.threads, args.rounds)
    first = next(iter(report["workloads"].values()))
    report["versions"] = {side: first["runs"][side][0]["versions"] for side in SIDES}
    found_at = sorted(RESULTS.glob("trl_settings_cpu-*.json"))
    if found_at:
        report["sweep"] = json.loads(found_at[-1].read_text())
    stem = RESULTS / f"cpu_vs_trl-{date}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(report))
    if "learning" in report["workloads"]:
        draw_curves(report["workloads"]["learning"], stem.with_suffix(".png"))
    print(table(report))


if __name__ == "__main__":
    main()
