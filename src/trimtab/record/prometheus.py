"""Metrics for Prometheus: the last row of a run, under names that follow from those of metrics.jsonl.

`reward/mean` is `trimtab_reward_mean{run="..."}`: slashes become underscores, `@` becomes `_at_`, and what Prometheus does not
allow in a name an underscore. Metrics that only grow are counters, which end in `_total`. `trimtab_run_info` has what a run is
as labels, `trimtab_last_step_timestamp_seconds` the time of its last row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.schema import Observe

GROWING = ("run/tokens_total", "run/oom_recoveries", "run/rank_restarts")
"""Metrics that count from the run's beginning."""
NOT_SHOWN = ("time/at",)
"""Metrics that have a name of their own here."""
PREFIX = "trimtab_"
LAST_STEP, STEP_NAME = f"{PREFIX}last_step_timestamp_seconds", f"{PREFIX}step"
MAX_LABEL_CHARACTERS = 200


@dataclass(frozen=True)
class LastRow:
    """A run as Prometheus sees it."""

    run: str
    step: int | None = None
    at: float | None = None
    """Unix seconds of the last row."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    info: Mapping[str, str] = field(default_factory=dict)


def prometheus_name(metric: str) -> str:
    """The name under which Prometheus stores a metric."""
    name = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", metric.replace("@", "_at_"))
    return f"{name.removesuffix('_total')}_total" if metric in GROWING else name


def families(rows: Iterable[LastRow]) -> Iterator[Any]:
    """Metric families of runs, for a collector of prometheus-client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    rows = list(rows)
    info = InfoMetricFamily(f"{PREFIX}run", "What a run is")
    last = GaugeMetricFamily(LAST_STEP, "Unix time of the last row of metrics.jsonl", labels=["run"])
    step = GaugeMetricFamily(STEP_NAME, "Step of the last row of metrics.jsonl", labels=["run"])
    for row in rows:
        info.add_metric([], {"run": _label(row.run)} | {key: _label(value) for key, value in row.info.items()})
        if row.at is not None:
            last.add_metric([_label(row.run)], row.at)
        if row.step is not None:
            step.add_metric([_label(row.run)], row.step)
    yield from (info, last, step)
    names = dict.fromkeys(name for row in rows for name in sorted(row.metrics) if name not in NOT_SHOWN)
    taken = {LAST_STEP: "", STEP_NAME: "", f"{PREFIX}run_info": ""}
    for metric in names:
        name = prometheus_name(metric)
        if taken.setdefault(name, metric) != metric:  # another metric has this name already
            name = f"{name}_{crc32(metric.encode('utf-8', 'replace')):08x}"
            if taken.setdefault(name, metric) != metric:
                continue
        kind = CounterMetricFamily if metric in GROWING else GaugeMetricFamily
        family = kind(name.removesuffix("_total") if metric in GROWING else name, _help(metric), labels=["run"])
        for row in rows:
            if metric in row.metrics:
                family.add_metric([_label(row.run)], row.metrics[metric])
        yield family


def _label(text: str) -> str:
    return text[:MAX_LABEL_CHARACTERS].encode("utf-8", "replace").decode()


def _help(metric: str) -> str:
    return f"{metric} of metrics.jsonl, docs/metrics.md".encode("utf-8", "replace").decode().replace("\n", " ")


class Collected:
    """What prometheus-client asks at each scrape."""

    def __init__(self, rows: Callable[[], Iterable[LastRow]]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Any]:
        yield from families(self._rows())

    def describe(self) -> Iterable[Any]:
        """Nothing is known before the first row: no scrape is needed to register."""
        return ()


def exposition(rows: Callable[[], Iterable[LastRow]]) -> bytes:
    """All runs in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(rows))
    return generate_latest(registry)


class PrometheusPort:
    """Answers Prometheus while a run trains, from a thread, with a registry of its own. Nothing is read or computed between two
    scrapes but the row that is kept."""

    def __init__(self, port: int, host: str, run: str) -> None:
        server = _client()
        registry = server.CollectorRegistry(auto_describe=False)
        registry.register(Collected(lambda: [self._row]))
        self._row = LastRow(run)
        try:
            self._server, self._thread = server.start_http_server(port, host, registry)
        except OSError as error:
            raise _taken(port, host, error) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        merged = {**self._row.metrics, **metrics}
        self._row = LastRow(self._row.run, step, metrics.get("time/at") or time.time(), merged, self._row.info)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        fix = "Install it with: pip install 'trimtab[serve]', or remove the key"
        raise ConfigError(
            [Problem("observe.prometheus", "the prometheus-client package is not installed", fix)]
        ) from error
    return prometheus_client


def refuse_prometheus(observe: Observe) -> None:
    """What would stop a run with `observe.prometheus` after its weights were loaded: no package, a port that is taken."""
    if observe.prometheus is None:
        return
    _client()
    import socket

    host, port = observe.prometheus_host, observe.prometheus
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        raise _taken(port, host, error) from error


def _taken(port: int, host: str, error: OSError) -> ConfigError:
    what = f"port {port} of {host} cannot be used: {error.strerror or error}"
    return ConfigError(
        [Problem("observe.prometheus", what, "Write another port, or null; `trimtab serve` offers /metrics, too")]
    )
