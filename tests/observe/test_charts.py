"""The catalogue of charts has every metric once decided on, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.observe.planted_rows import LEVELS
from trimtab.observe.chart import ALL
from trimtab.observe.charts import CHARTS, ONLY_IN_ALL_METRICS, catalogue, chart_of, charts_of, small_charts

DOCS = Path(__file__).parents[2] / "docs"
SOURCES = ("metrics.md", "environments.md", "rewards.md")
CONTRACT = (
    "time/at", "time/observe", "run/start", "run/tokens_total", "rollout/prefill_tokens", "rollout/decode_steps", "rollout/slots",
    "rollout/tail_s", "update/forward_backward_s", "update/optimizer_s", "update/offload_wait_s", "memory/device_used_gib",
    "memory/reserved_peak_gib", "device/util", "device/power_w", "device/temperature_c", "device/clock_share",
)  # fmt: skip
"""New in this version."""
EXAMPLES = {"PHASE": "update", "REASON": "stale", "K": "4", "NAME": "sums", "rank<N>": "rank0", "<phase>": "update"}


def documented() -> set[str]:
    """Names in docs/metrics.md, with examples in place of what stands for something."""
    text = (DOCS / "metrics.md").read_text()
    names = set(re.findall(r"`((?:[a-z]+)/[^`\s]+)`", text))
    names = {name for name in names if not name.startswith(("RUN", "eval/environment", "dashboards/"))}
    for word, example in EXAMPLES.items():
        names = {name.replace(word, example) for name in names}
    return names | {"time/idle", *CONTRACT}


def test_every_documented_metric_is_in_a_chart_or_left_out_by_decision() -> None:
    shown = {name for name in documented() for chart in CHARTS if any(line.shows(name) for line in chart.metrics)}
    assert sorted(documented() - shown - set(ONLY_IN_ALL_METRICS)) == []
    assert sorted(shown & set(ONLY_IN_ALL_METRICS)) == []


def test_every_metric_of_a_chart_is_documented() -> None:
    known = documented() | {
        f"memory/{phase}_peak_gib" for phase in ("rollout", "reward", "score", "optimizer", "publish")
    }
    known |= {"memory/checkpoint_peak_gib", "memory/eval_peak_gib"}
    text = "".join((DOCS / name).read_text() for name in SOURCES)
    named = {line.name for chart in CHARTS for line in chart.metrics if line.name}
    assert sorted(name for name in named - known if f"`{name}`" not in text) == []


def test_ids_are_unique_and_orders_rise() -> None:
    assert len({chart.id for chart in CHARTS}) == len(CHARTS)
    assert [chart.order for chart in CHARTS] == list(range(len(CHARTS)))


@pytest.mark.parametrize("stage", ALL)
def test_each_stage_has_one_objective_and_six_small_charts(stage: str) -> None:
    overview = charts_of(stage, "overview")
    assert [chart.id for chart in overview if not chart.small][1:] == ["phases"]
    metrics = {"rl": ("policy/entropy",), "sft": (), "reward_model": ()}[stage]
    found = small_charts(stage, metrics)
    assert len(found) == {"rl": 6, "sft": 5, "reward_model": 6}[stage]


def test_a_reference_and_a_critic_have_their_place_on_the_first_screen() -> None:
    plain = [chart.id for chart in small_charts("rl", LEVELS)]
    assert plain == ["entropy", "zero_std_groups", "length", "truncated", "grad_norm", "logprob_gap"]
    both = [chart.id for chart in small_charts("rl", (*LEVELS, "policy/kl_ref", "value/explained_variance"))]
    assert both == ["entropy", "zero_std_groups", "truncated", "grad_norm", "kl_ref", "explained_variance"]


def test_prefixes_are_written_out_for_known_metrics() -> None:
    metrics = ["reward/mean", "reward/math", "reward/task/sums/mean", "reward/judge/wait_s", "reward/failed"]
    found = {chart["id"]: [line.get("name") for line in chart["metrics"]] for chart in catalogue(metrics)}
    assert found["reward_parts"] == ["reward/mean", "reward/math"]
    assert found["task_rewards"] == ["reward/task/sums/mean"] and found["judge"] == ["reward/judge/wait_s"]
    assert not any("prefix" in line for chart in catalogue(metrics) for line in chart["metrics"])
    assert any("prefix" in line for chart in catalogue() for line in chart["metrics"])


def test_a_metric_leads_to_its_chart() -> None:
    assert chart_of("policy/entropy", "rl") == "entropy" and chart_of("memory/host_gib", "sft") == "host_memory"
    assert chart_of("no/such", "rl") is None
