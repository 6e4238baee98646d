"""Published runs of other systems beside what is predicted for them: writes docs/predictions.md from published.yaml.

python bench/predictions.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.model.sizes import FUSED_FAMILIES
from trimtab.plan.arrange import Arrangement, arrange
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.place import place_over
from trimtab.plan.scenario import parse_quantiles, scenario_of, with_lengths
from trimtab.plan.shape import ModelShape, read_shape
from trimtab.plan.simulate import simulate
from trimtab.plan.source import WELL_KNOWN

HERE = Path(__file__).parent
DATA, PAGE = HERE / "published.yaml", HERE.parent / "docs" / "predictions.md"
HOST_BYTES = 1500 * GIB
SIMULATED_STEPS = 2
UNITS = {
    "step_s": "s a step", "rollout_s": "s of rollout", "update_s": "s of update", "tokens_per_device_s": "tokens/s per device",
    "tokens_per_s": "tokens/s", "memory_gib": "GiB a device",
}  # fmt: skip
HEAD = """\
# Predictions beside published figures

<!-- Written by `python bench/predictions.py` from bench/published.yaml. Change these, not this page. -->

What `trimtab plan` predicts for runs that other projects have published, beside their figures. No rate was fitted to any of them:
rates come from one H200 ([planning](planning.md#how-good-it-is)), links are the makers' rates times an estimate. A ratio above 1
means that the prediction is larger. Published steps also hold what a plan does not count (rewards, environments, logging, waiting
for the slowest host), and other software; so a prediction for Trimtab is expected to be shorter. Where lengths were not published
they are assumed, and a ratio says less. The first predictions for Qwen3-30B-A3B were 4.6 and 3.2 times the published steps; the
search then learned to cut engines of expert models over devices, so that these two rows are no test of it.

| run | figure | published | predicted | ratio |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Predicted:
    """Figures by the names of `UNITS`, and the placement in words."""

    figures: dict[str, float]
    words: str


def shape_of(name: str, models: dict[str, Any]) -> ModelShape:
    return read_shape(models[name] if name in models else WELL_KNOWN[name])


def predict_run(entry: dict[str, Any], models: dict[str, Any]) -> Predicted:
    shape = shape_of(entry["model"], models)
    machine = Machine(find_device(entry["device"]), entry["devices"], HOST_BYTES, 96)
    fused = shape.kind in FUSED_FAMILIES
    if entry.get("trains_only"):
        return _trainer(entry, shape, machine)
    job = Job(
        shape, 2, entry["prompts"], entry["samples"], entry["prompt_tokens"], entry["prompt_tokens"], entry["max_new_tokens"],
        fused=fused, tiled_head=machine.device.tiled_head, staleness=entry.get("staleness", 0),
        reference=entry.get("reference", False), compared=entry.get("reference", False),
    )  # fmt: skip
    job = with_lengths(job, parse_quantiles(entry["lengths"]))
    placed = {} if entry["placement"] != "colocated" else {"devices": entry["devices"]}
    run = Run(placement=entry["placement"], engine=entry["engine"], **placed)
    chosen = arrange(run, job, machine).chosen
    if not chosen.fits:  # an engine of one device does not hold it
        run = run.with_values({"engine": "auto"})
        chosen = arrange(run, job, machine).chosen
    assert chosen.fits, entry["name"]
    return Predicted(_figures(chosen), chosen.words())


def _figures(chosen: Arrangement) -> dict[str, float]:
    """Seconds are the simulator's, which has the tail of a rollout and what runs beside what; parts of a step are the plan's."""
    seconds = simulate(scenario_of(chosen, SIMULATED_STEPS)).step_s
    job = chosen.job
    tokens = job.sequences * (job.typical_prompt + job.expected_completion)
    return {
        "step_s": seconds,
        "tokens_per_device_s": tokens / seconds / chosen.devices,
        "rollout_s": chosen.times.rollout,
        "update_s": chosen.times.update,
    }


def _trainer(entry: dict[str, Any], shape: ModelShape, machine: Machine) -> Predicted:
    tokens = entry["sequence_tokens"]
    job = Job(
        shape,
        2,
        entry["devices"],
        1,
        1,
        1,
        tokens - 1,
        generates=False,
        fused=False,
        tiled_head=machine.device.tiled_head,
    )
    run = Run(shard=entry["shard"], shard_devices=entry["devices"], devices=entry["devices"], token_budget=tokens,
              checkpoint_activations=True, placement="colocated")  # fmt: skip
    plan = place_over(run, job, machine)
    assert plan.fits, entry["name"]
    memory = plan.ledger["update"].device_bytes / GIB
    return Predicted(
        {"tokens_per_s": entry["devices"] * tokens / plan.times.total, "memory_gib": memory}, "trains only"
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def page() -> str:
    data = yaml.safe_load(DATA.read_text())
    rows, notes = [], []
    for entry in data["runs"]:
        found = predict_run(entry, data["models"])
        for place, (name, published) in enumerate(entry["published"].items()):
            mine = found.figures[name]
            told = entry["name"] if place == 0 else ""
            rows.append(f"| {told} | {UNITS[name]} | {published:,g} | {_figure(mine)} | {mine / published:.2f} |")
        notes.append(
            f"- **{entry['name']}** ({entry['source']}), planned as {found.words}. Assumed: {entry['assumed']}."
        )
    return HEAD + "\n".join(rows) + "\n\n## What is assumed\n\n" + "\n".join(notes) + "\n" + TAIL


TAIL = """
Not here: AReaL's hours for 1.5B and 7B models on 16 and 24 hosts and NeMo-RL's eight steps off on 192 devices, whose lengths and
division of devices are not published, and rows on GB200, which is not in the list of devices.

## What the ratios say

- Memory of a trainer is near what was measured.
- Steps of synchronous runs are predicted shorter than published: the plan counts no rewards, no logging and no waiting between
  processes.
- verl's step gained nothing from 64 to 128 devices; the plan predicts a gain. Its rollout is bound by the longest completion, as
  theirs is, but its update goes on to scale.
- Off: for Qwen3-30B-A3B the plan takes colocated for faster than halves one step off; published, the halves win. What laying out
  tokens for their experts costs is counted from bytes and tiles, and was not measured.
- Off: the trainer with one sequence of 16,384 tokens a device. The plan hides more of the gathering of layers behind so short a
  pass than a real one does (`HIDDEN_SHARE` in `plan/communication.py` is an estimate).

These are predictions. Nothing on this page has run on these machines.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    text = page()
    if parser.parse_args().check:
        if PAGE.read_text() != text:
            sys.exit(f"{PAGE} is not what {Path(__file__).name} writes; run it")
        return
    PAGE.write_text(text)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
