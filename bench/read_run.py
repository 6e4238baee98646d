"""How long a run of many steps takes to read: writes a metrics.jsonl of so many steps and metrics; times the reader and doctor.

    python bench/read_run.py --steps 10000 --metrics 58

Times are of this process's CPU, so that neighbours do not count; the best of five.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import read_record
from trimtab.record.reader import RunReader

NAMES = ("reward/mean", "reward/std", "policy/entropy", "policy/grad_norm", "time/rollout", "time/update", "time/total")


def write_run(folder: Path, steps: int, metrics: int) -> None:
    draw = random.Random(0)
    names = [*NAMES, *(f"other/metric_{index}" for index in range(metrics - len(NAMES)))]
    (folder / "config.yaml").write_text(f"learn: {{steps: {steps}}}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, **{name: draw.random() for name in names}}) + "\n")


def best(work: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return round(min(found), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=58)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, asked.steps, asked.metrics)
        reader = RunReader(folder)
        reader.update()
        record = read_record(folder)
        result = {
            "steps": asked.steps,
            "megabytes": round((folder / "metrics.jsonl").stat().st_size / 1e6, 1),
            "read_s": best(lambda: RunReader(folder).update()),
            "read_again_s": best(reader.update),
            "record_s": best(lambda: read_record(folder)),
            "rules_s": best(lambda: examine(record)),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
