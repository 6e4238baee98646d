"""Old and new code side by side: the same weights, sampled tokens and metrics, bit for bit.

    python bench/identity.py OLD_COMMIT [--only grpo ppo] [--demo-steps 150]

Checks OLD_COMMIT out beside this tree, runs every case with both in this Python environment, on the CPU with one thread, and
compares the exported weights, the samples, the samples of evaluations and every metric but times, memory and speeds. `resume`
kills the new code (SIGKILL, once its third step is on disk) and resumes it; `upgrade` kills the old code and resumes its folder
with the new.
Writes bench/results/identity-DATE.md and ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 1200.0
KILLED_AFTER = 3
NOT_LEARNED = (
    "time/",
    "checkpoint/",
    "memory/",
    "throughput/",
    "rollout/tokens_per_s",
    "rollout/prefill_s",
    "rollout/decode_s",
    "reward/latency_max_s",
    "environment/seconds",
    "environment/wait_s",
    "eval/environment/seconds",
    "eval/environment/wait_s",
)
USER_CODE = """
import trimtab

def digits(completions, **_):
    return [sum(character.isdigit() for character in text) / 8 for text in completions]

def rarely(completions, **_):  # many groups of equal rewards, so that DAPO asks for more
    return [float("7" in text) for text in completions]

class Echo:
    def __init__(self):
        self.heard = 0

    def reset(self, **columns):
        return None

    def step(self, text):
        self.heard += 1
        return trimtab.Observation(f"<{len(text)}>", self.heard >= 3, reward=float(text.count("a")))
"""
LEARN = {
    "steps": 6,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "updates_per_step": 2,
    "max_new_tokens": 12,
    "lr": 1e-2,
    "schedule": {"kind": "linear", "warmup_steps": 2},
}
OBSERVE = {"checkpoint_every": 1, "keep_checkpoints": 1, "samples_every": 1, "tensorboard": False}
RUN = {"device": "cpu", "threads": 1, "reward_workers": 1}


def reinforcement(
    algorithm: str, reward: str = "digits", model: Mapping[str, Any] | None = None, **learn: Any
) -> dict[str, Any]:
    return {
        "model": {**(model or {})},
        "data": {"train": "task:arithmetic", "eval": "task:arithmetic", "options": {"size": 24, "eval_size": 4}},
        "reward": [{"fn": f"user_code.py:{reward}"}],
        "learn": {**LEARN, "algorithm": algorithm, **learn},
        "run": RUN,
        "eval": {"threshold": 0.1},
        "observe": {**OBSERVE, "eval_every": 2},
    }


def offline(learn: dict[str, Any]) -> dict[str, Any]:
    run, observe = dict(RUN), dict(OBSERVE)
    del run["reward_workers"], observe["samples_every"]  # nothing is sampled or scored
    return {"model": {}, "data": {"train": "rows.jsonl"}, "learn": learn, "run": run, "observe": observe}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("train", reinforcement("grpo", kl={"coef": 0.05, "target": 0.01, "horizon": 100})),
    "gspo": ("train", reinforcement("gspo")),
    "dapo": ("train", reinforcement("dapo", "rarely", dynamic_sampling={"enabled": True, "max_refills": 3})),
    "ppo": ("train", reinforcement("ppo", critic={"lr": 1e-2, "warmup_steps": 1})),
    "reinforce_pp": ("train", reinforcement("reinforce_pp", kl={"coef": 0.05})),
    "lora": ("train", reinforcement("grpo", model={"lora": {"r": 4}}, kl={"coef": 0.05})),
    "8bit": ("train", reinforcement("grpo", optimizer={"states": "8bit"})),
    "sft": ("sft", offline({"steps": 6, "sequences_per_step": 8, "lr": 1e-2})),
    "reward-model": ("reward-model", offline({"steps": 6, "pairs_per_step": 8, "lr": 1e-2})),
    "environment": (
        "train",
        {
            **reinforcement("grpo", sampling={"stop_token_ids": list(range(3, 20))}),
            "environment": {"fn": "user_code.py:Echo"},
            "reward": [{"fn": "environment"}],
        },
    ),
}


def prepare(folder: Path) -> None:
    """A tiny model, rows and user code that both sides use."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "user_code.py").write_text(USER_CODE)
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(8)
        for b in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (_, config) in CASES.items():
        config = {**config, "model": {"path": "model", **config["model"]}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def start(source: Path, folder: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(source / "src"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "trimtab", *arguments],
            cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"a run took longer than {DEADLINE_S:.0f} s; see {log}") from None
    if code:
        raise SystemExit(f"a run ended with {code}:\n{log.read_text(errors='replace')[-3000:]}")


def train(source: Path, folder: Path, side: str, case: str, *more: str) -> Path:
    command, _ = CASES[case]
    run, log = folder / f"{case}-{side}", folder / f"{case}-{side}.log"
    finish(start(source, folder, log, command, f"{case}.yaml", f"observe.dir={run}", *more), log)
    return run


def killed_and_resumed(first: Path, second: Path, folder: Path, name: str) -> Path:
    """A GRPO run that is killed once its third step is on disk, and is resumed by `second`'s code."""
    run, log = folder / name, folder / f"{name}.log"
    process = start(first, folder, log, "train", "grpo.yaml", f"observe.dir={run}")
    deadline = time.monotonic() + DEADLINE_S
    while not (run / f"checkpoints/step-{KILLED_AFTER}").exists() and process.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"step {KILLED_AFTER} was never saved; see {log}")
        time.sleep(0.005)
    if process.poll() is not None:
        raise SystemExit(f"the run ended before it was killed; see {log}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # the guardians end what it had started, and the folder is free
    finish(start(second, folder, log, "train", "grpo.yaml", f"observe.dir={run}", "--resume"), log)
    return run


def demo(source: Path, folder: Path, side: str, steps: int) -> Path:
    run, log = folder / f"demo-{side}", folder / f"demo-{side}.log"
    finish(start(source, folder, log, "demo", "--dir", str(run), "--steps", str(steps), "run.threads=1"), log)
    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What was learned, step by step: metrics.jsonl without times, memory and speeds."""
    with (run / "metrics.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if not name.startswith(NOT_LEARNED)} for row in rows]


def differences(old: Path, new: Path) -> Iterator[str]:
    """Where two run folders differ in what was learned."""
    metric_files = sorted(path.relative_to(old) for path in old.rglob("metrics.jsonl"))
    if not metric_files:
        yield "no metrics"
    for file in metric_files:
        before, after = rows_of(old / file.parent), rows_of(new / file.parent)
        if len(before) != len(after):
            yield f"{file}: {len(before)} and {len(after)} rows"
        for number, (row, other) in enumerate(zip(before, after)):
            names = sorted(name for name in row.keys() | other.keys() if repr(row.get(name)) != repr(other.get(name)))
            if names:
                yield f"{file}, row {number}: {', '.join(f'{n} {row.get(n)} {other.get(n)}' for n in names[:4])}"
                break
    compared = [
        p.relative_to(old)
        for pattern in ("**/final/*.safetensors", "**/samples/*.jsonl", "**/eval/**/*.jsonl")
        for p in sorted(old.glob(pattern))
    ]
    if not any(file.suffix == ".safetensors" for file in compared):
        yield "no exported weights"
    for file in compared:
        if not (new / file).exists():
            yield f"{file} is missing"
        elif (old / file).read_bytes() != (new / file).read_bytes():
            yield f"{file} differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_commit")
    names = [*CASES, "resume", "upgrade", "demo"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--demo-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", options.old_commit], cwd=ROOT, text=True).strip()
    here = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="identity-") as temporary:
        folder, old = Path(temporary), Path(temporary) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(old), commit], cwd=ROOT, check=True)
        try:
            prepare(folder)
            for name in options.only:
                if name == "demo":
                    runs = [
                        demo(source, folder, side, options.demo_steps) for side, source in (("old", old), ("new", ROOT))
                    ]
                elif name in ("resume", "upgrade"):
                    whole = folder / "grpo-old"
                    whole = whole if whole.exists() else train(old, folder, "old", "grpo")
                    runs = [whole, killed_and_resumed(old if name == "upgrade" else ROOT, ROOT, folder, name)]
                else:
                    runs = [train(source, folder, side, name) for side, source in (("old", old), ("new", ROOT))]
                found[name] = list(differences(*runs))
                print(f"{name:14} {'identical' if not found[name] else '; '.join(found[name])}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    lines = [
        f"# Old code ({commit}) and new code ({here}), bit for bit",
        "",
        f"`python bench/identity.py {options.old_commit}`, {datetime.date.today()}, CPU, one thread: exported weights, samples,",
        "metrics (times and memory excepted).",
        "",
        "| case | result |",
        "|---|---|",
        *(f"| {name} | {'identical' if not said else '; '.join(said)} |" for name, said in found.items()),
    ]
    file = options.out / f"identity-{datetime.date.today()}.md"
    file.write_text("\n".join(lines) + "\n")
    print(f"wrote {file}")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
