"""dashboards/trimtab.json, a Grafana dashboard, written from the catalogue of charts: `python -m trimtab.observe.grafana`.

With `--check` it says whether the file is what would be written, and writes nothing.

Every chart that shows metrics of metrics.jsonl is a panel, on a row for its page; charts of other files are left out. Queries
have the names of record/prometheus.py, so the dashboard works with `observe.prometheus` and with `trimtab serve` alike.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from trimtab.base.files import write_text
from trimtab.observe.chart import Chart, ChartLine
from trimtab.observe.charts import CHARTS
from trimtab.record.prometheus import LAST_STEP, PREFIX, STEP_NAME, prometheus_name

PAGE = Path(__file__).parents[3] / "dashboards" / "trimtab.json"
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
UNITS = {"share": "percentunit", "s": "s", "GiB": "gbytes", "W": "watt", "°C": "celsius", "tokens/s": "short"}
ROWS = {"overview": "Overview", "learning": "Learning", "speed": "Speed", "memory": "Memory"}
SOURCE = {"type": "prometheus", "uid": "${source}"}
RUN = 'run=~"$run"'


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = [_since_last_step(1), _last_step(2)]
    y, id = 6, 3
    for page, title in ROWS.items():
        panels.append(
            {"type": "row", "id": id, "title": title, "collapsed": False, "gridPos": _place(0, y, COLUMNS, 1)}
        )
        y, id = y + 1, id + 1
        charts = [chart for chart in CHARTS if chart.page == page and targets_of(chart)]
        for number, chart in enumerate(charts):
            at = number % (COLUMNS // WIDTH)
            panels.append(
                _panel(chart, id, _place(at * WIDTH, y + number // (COLUMNS // WIDTH) * HEIGHT, WIDTH, HEIGHT))
            )
            id += 1
        y += -(-len(charts) // (COLUMNS // WIDTH)) * HEIGHT
    return {
        "uid": "trimtab",
        "title": "Trimtab",
        "description": "Runs of Trimtab. Written by python -m trimtab.observe.grafana from the catalogue of charts.",
        "tags": ["trimtab"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_variable(), _run_variable()]},
        "panels": panels,
    }


def targets_of(chart: Chart) -> list[dict[str, Any]]:
    """A query for each line; a prefix is a query over names."""
    found: dict[str, dict[str, Any]] = {}
    for line in chart.metrics:
        query = query_of(line)
        found.setdefault(query, {"expr": query, "legendFormat": _legend(line), "datasource": SOURCE})
    return [target | {"refId": _letters(number)} for number, target in enumerate(found.values())]


def query_of(line: ChartLine) -> str:
    if line.name is not None:
        return f"{prometheus_name(line.name)}{{{RUN}}}"
    prefix = line.prefix or ""
    if "*" in prefix:
        pattern = prometheus_name(prefix.replace("*", "STAR")).replace("STAR", ".+")
    else:
        pattern = f"{prometheus_name(prefix)}.+"
    others = "|".join(sorted(prometheus_name(name) for name in line.without))
    but = f', __name__!~"{others}"' if others else ""
    return f'{{__name__=~"{pattern}"{but}, {RUN}}}'


def _legend(line: ChartLine) -> str:
    return "{{run}} {{__name__}}" if line.name is None else f"{{{{run}}}} {line.label}"


def _letters(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else _letters(number // 26 - 1) + chr(ord("A") + number % 26)


def _panel(chart: Chart, id: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "auto", "spanNulls": True}
    if chart.kind == "stack":
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    if chart.log:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    defaults: dict[str, Any] = {"unit": UNITS.get(chart.unit, "short"), "custom": custom}
    if chart.zero:
        defaults["min"] = 0
    if chart.unit and chart.unit not in UNITS:
        custom["axisLabel"] = chart.unit
    return {
        "type": "timeseries",
        "id": id,
        "title": chart.title,
        "description": chart.note,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets_of(chart),
    }


def _stat(id: int, title: str, description: str, query: str, unit: str, x: int) -> dict[str, Any]:
    """A number a run, in the first row."""
    target = {"expr": query, "legendFormat": "{{run}}", "refId": "A", "datasource": SOURCE}
    return {
        "type": "stat",
        "id": id,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": _place(x, 0, 12, 6),
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [target],
    }


def _since_last_step(id: int) -> dict[str, Any]:
    description = "A run that is quiet for longer than its steps take has ended, or hangs."
    return _stat(id, "Since the last step", description, f"time() - {LAST_STEP}{{{RUN}}}", "s", x=0)


def _last_step(id: int) -> dict[str, Any]:
    return _stat(id, "Step", "The last step of each run.", f"{STEP_NAME}{{{RUN}}}", "none", x=12)


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": f"label_values({PREFIX}run_info, run)", "refId": "run"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "sort": 2,
    }


def queries() -> list[str]:
    """Every query of the dashboard, with its variable filled in, as Grafana sends it for all runs."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$run\b", ".*", query) for query in found]


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text():
            return 0
        print(f"{PAGE.name} is not what the catalogue of charts says. Run: python -m trimtab.observe.grafana")
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    write_text(PAGE, text())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
