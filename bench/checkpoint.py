"""How long training waits for a checkpoint: written behind it, against written while it waits.

    PYTHONPATH=src python bench/checkpoint.py                 # on the CPU: 135M parameters, float32
    PYTHONPATH=src python bench/checkpoint.py --device cuda   # bfloat16 with float32 masters

Random weights in SmolLM2-135M's shape, one optimizer step taken, so that there are moments. Both ways write the same state into
the same folder, in turns; the least of several repeats counts, as a machine may have other work.

- `wait`: seconds in which the loop stands still: in the call, and before the next optimizer step, which comes after some other
  work (in a run, a rollout and a backward pass), and, a second time, at once.
- `write`: from the beginning of a write to its end on disk.
- The first checkpoint of a run is told apart. Its memory is taken while the run begins (`CheckpointWriter.prepare`); here, before
  anything is measured.
- `work`: seconds of a fixed amount of other work alone, and while a checkpoint is written.

Writes bench/results/checkpoint_DEVICE-DATE.md and .json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.config.learn import Learn
from trimtab.model.folder import other_files
from trimtab.model.weights import WeightStore
from trimtab.record.checkpoint import RunState
from trimtab.record.part import Part, collect
from trimtab.record.saving import PendingCheckpoint
from trimtab.record.writer import CheckpointWriter
from trimtab.update.optimizer import MasterAdamW

SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
FIGURES = ("synchronous_s", "wait_s", "wait_at_once_s", "write_s", "work_alone_s")
LIMIT = 0.05
"""Of a synchronous write: what training may wait at most."""


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


class Trained:
    """A model that has taken a step."""

    def __init__(self, device: torch.device) -> None:
        config = AutoConfig.for_model("llama", **SHAPE)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        self.optimizer = MasterAdamW(WeightStore(self.model.named_parameters()), Learn(lr=1e-5))
        sum((p * torch.randn_like(p)).sum() for p in self.model.parameters()).backward()
        self.optimizer.step(1e-5)
        self.files = other_files(self.model, NoTokenizer())

    def part(self) -> Part:
        return collect(self.model, self.optimizer, None, self.files)


def work(device: torch.device) -> float:
    """Seconds of some matrix products."""
    side, times = (768, 60) if device.type == "cpu" else (4096, 400)
    matrix = torch.randn(side, side, device=device)
    begin = time.perf_counter()
    for _ in range(times):
        matrix = (matrix @ matrix).clamp_(-1, 1)
    float(matrix.sum())
    return time.perf_counter() - begin


def save(writer: CheckpointWriter, trained: Trained, run: Path, step: int) -> None:
    writer.save(trained.part, PendingCheckpoint(run, RunState(step=step), 1))


def waited(writer: CheckpointWriter) -> float:
    """Seconds in which the loop has waited for the call, and before the next optimizer step."""
    writer.before_change()
    return writer.take_metrics()["checkpoint/wait_s"]


def measure(device: torch.device, run: Path, repeats: int) -> dict[str, Any]:
    trained = Trained(device)
    size = trained.part().nbytes
    waiting = CheckpointWriter(device, lambda where, do: do(), copies=False)
    behind = CheckpointWriter(device, lambda where, do: do(), copies=True)
    begin = time.perf_counter()
    behind.prepare(size)
    behind._preparing.wait()
    prepared = time.perf_counter() - begin
    rows: list[dict[str, float]] = []
    work(device)
    for repeat in range(repeats):
        begin = time.perf_counter()
        save(waiting, trained, run, 3 * repeat + 1)
        waiting.wait()
        synchronous = time.perf_counter() - begin
        alone = work(device)
        save(behind, trained, run, 3 * repeat + 2)
        beside = work(device)
        wait = waited(behind)
        still = behind._behind.busy and not behind._behind.ended
        behind.wait()
        write = behind.take_metrics()["checkpoint/write_s"]
        save(behind, trained, run, 3 * repeat + 3)
        at_once = waited(behind)
        behind.wait()
        behind.take_metrics()
        rows.append(
            {
                "synchronous_s": synchronous,
                "wait_s": wait,
                "wait_at_once_s": at_once,
                "write_s": write,
                "work_alone_s": alone,
                "work_beside_s": beside if still else float("nan"),
            }
        )
        print(" ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    least = {name: min(row[name] for row in rows) for name in ("synchronous_s", "wait_s", "wait_at_once_s", "write_s")}
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "machine": platform.machine(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "bytes": size,
        "prepare_s": prepared,
        "first_wait_s": rows[0]["wait_s"],
        "least": least,
        "share": least["wait_s"] / least["synchronous_s"],
        "repeats": rows,
    }


def table(found: dict[str, Any], date: str) -> str:
    least, rows = found["least"], found["repeats"]
    at_once = least["wait_at_once_s"]
    lines = [
        f"# Checkpoints written behind the training, {date}",
        "",
        f"{found['device']}, {found['cores']} threads, torch {found['torch']}. SmolLM2-135M's shape, "
        f"{found['bytes'] / 1e9:.2f} GB a checkpoint. Least of {len(rows)} repeats (bench/checkpoint.py).",
        "",
        "| | seconds |",
        "|---|---|",
        f"| synchronous write | {least['synchronous_s']:.3f} |",
        f"| wait, written behind | {least['wait_s']:.3f} ({found['share']:.1%} of it; at most {LIMIT:.0%} is asked for) |",
        f"| wait where an optimizer step comes at once | {at_once:.3f} ({at_once / least['synchronous_s']:.1%}) |",
        f"| wait for the first one | {found['first_wait_s']:.3f} |",
        f"| the write itself, behind | {least['write_s']:.3f} |",
        f"| taking the memory for copies, once, while a run begins | {found['prepare_s']:.3f} |",
        "",
        "| repeat | synchronous | wait | wait, step at once | write behind | work alone | work beside a write |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(rows, 1):
        beside = "ended before" if row["work_beside_s"] != row["work_beside_s"] else f"{row['work_beside_s']:.3f}"
        figures = " | ".join(f"{row[name]:.3f}" for name in FIGURES)
        lines.append(f"| {number} | {figures} | {beside} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk to be measured; a temporary one by default"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    date = datetime.date.today().isoformat()
    with tempfile.TemporaryDirectory(dir=asked.folder) as run:
        found = measure(torch.device(asked.device), Path(run), asked.repeats)
    name = asked.out / f"checkpoint_{asked.device}-{date}"
    name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    name.with_suffix(".md").write_text(table(found, date))
    print(table(found, date))


if __name__ == "__main__":
    main()
