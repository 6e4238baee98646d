"""Prometheus: names, the port of a run, /metrics of the server, a real Prometheus that scrapes them, and the dashboard."""

from __future__ import annotations

import copy
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.observe.planted import plant
from tests.web.serving import DEADLINE_S, Client, append, serving, wait_for, write_run
from trimtab.base.errors import ConfigError
from trimtab.config.schema import Observe
from trimtab.observe import grafana
from trimtab.observe.charts import CHARTS
from trimtab.record.prometheus import LastRow, exposition, prometheus_name, refuse_prometheus
from trimtab.record.sinks import Sinks

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("reward/mean", "trimtab_reward_mean"),
        ("eval/pass@1", "trimtab_eval_pass_at_1"),
        ("memory/rank0/update_peak_gib", "trimtab_memory_rank0_update_peak_gib"),
        ("run/tokens_total", "trimtab_run_tokens_total"),
        ("run/oom_recoveries", "trimtab_run_oom_recoveries_total"),
        ("reward/my-part é", "trimtab_reward_my_part__"),
    ],
)
def test_names(metric: str, name: str) -> None:
    assert prometheus_name(metric) == name


def test_the_text_says_what_a_row_says() -> None:
    rows = [
        LastRow("a", 7, 1.5e9, {"reward/mean": 0.5, "run/tokens_total": 12.0, "time/at": 1.5e9}, {"stage": "rl"}),
        LastRow('b"\\\n', 1, None, {"reward/mean": 0.25, "reward/a-b": 1.0, "reward/a_b": 2.0}),
    ]
    text = exposition(lambda: rows).decode()
    assert "# TYPE trimtab_reward_mean gauge" in text
    assert "# TYPE trimtab_run_tokens_total counter" in text
    assert 'trimtab_reward_mean{run="a"} 0.5' in text
    assert 'trimtab_reward_mean{run="b\\"\\\\\\n"} 0.25' in text
    assert 'trimtab_run_info{run="a",stage="rl"} 1.0' in text
    assert 'trimtab_last_step_timestamp_seconds{run="a"} 1.5e+09' in text
    assert len(re.findall(r"^trimtab_reward_a_b\w*\{", text, re.M)) == 2  # two metrics, two names
    assert "trimtab_time_at" not in text
    if PROMTOOL:
        check = subprocess.run(
            [PROMTOOL, "check", "metrics"], input=text.encode(), capture_output=True, timeout=DEADLINE_S
        )
        assert check.returncode in (0, 3), check.stderr  # 3: remarks on names, such as those that end in _s
        assert b"error while" not in check.stderr


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_run_answers_at_its_port(tmp_path: Path) -> None:
    port = free_port()
    observe = Observe(tensorboard=False, prometheus=port)
    refuse_prometheus(observe)
    sinks = Sinks(tmp_path / "run", observe, None)
    client = Client(port)
    try:
        assert "trimtab_run_info" in client.ask("/metrics").body.decode()
        sinks.write(1, {"reward/mean": 0.5, "eval/pass@1": 0.1})
        sinks.write(2, {"reward/mean": 0.75, "policy/loss": float("nan")})
        text = client.ask("/metrics").body.decode()
        assert 'trimtab_reward_mean{run="run"} 0.75' in text
        assert 'trimtab_eval_pass_at_1{run="run"} 0.1' in text  # the last that there is
        assert 'trimtab_step{run="run"} 2.0' in text
        assert "policy_loss" not in text
        with pytest.raises(ConfigError, match=rf"observe\.prometheus: port {port} .* cannot be used"):
            refuse_prometheus(observe)
        with pytest.raises(ConfigError, match="cannot be used"):
            Sinks(tmp_path / "other", observe, None)
    finally:
        sinks.close()
    refuse_prometheus(observe)  # it is free again
    with pytest.raises(OSError):
        client.ask("/metrics")


def test_the_server_answers_for_all_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", 1)
    with serving(tmp_path / "runs") as server:
        text = server.ask("/metrics").body.decode()
        assert 'trimtab_reward_mean{run="a"} 0.3' in text
        assert 'trimtab_step{run="b"} 1.0' in text
        append(run, 4)
        assert 'trimtab_reward_mean{run="a"} 0.4' in server.ask("/metrics").body.decode()


@contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[int]:
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "trimtab", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [
            PROMETHEUS or "", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield port
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def ask(port: int, query: str) -> list[dict]:
    connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("GET", f"/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        response = connection.getresponse()
        if response.status == 503:  # it is not ready yet
            return []
        answer = json.loads(response.read())
    except OSError:
        return []
    finally:
        connection.close()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here (Debian has it as a package)")
def test_prometheus_scrapes_and_every_query_of_the_dashboard_works(tmp_path: Path) -> None:
    """Every query is accepted, and every one whose metrics a run has returns data."""
    for name in ("healthy", "sft", "reward_model"):
        plant(tmp_path / "runs" / name, name)
    (tmp_path / "prometheus").mkdir()
    with (
        serving(tmp_path / "runs") as server,
        prometheus(tmp_path / "prometheus", [f"127.0.0.1:{server.port}"]) as port,
    ):
        wait_for(lambda: len(ask(port, "trimtab_step")) == 3, 60)
        text = server.ask("/metrics").body.decode()
        names = set(re.findall(r"^(trimtab_\w+)\{", text, re.M))
        answered = 0
        for query in grafana.queries():
            found = ask(port, query)
            name = re.search(r"(trimtab_\w+)\{", query)
            if name and name[1] in names:
                assert found, query
                answered += 1
        assert answered > 60
        (value,) = ask(port, 'trimtab_reward_mean{run="healthy"}')
        last = json.loads((tmp_path / "runs" / "healthy" / "metrics.jsonl").read_text().splitlines()[-1])
        assert float(value["value"][1]) == pytest.approx(last["reward/mean"])
        assert time.time() - float(value["value"][0]) < 60


def test_the_dashboard_is_what_the_catalogue_says() -> None:
    assert grafana.PAGE.read_text(encoding="utf-8") == grafana.text(), "run: python -m trimtab.observe.grafana"
    assert grafana.main(["--check"]) == 0


def test_grafanas_own_library_knows_all_of_the_dashboard() -> None:
    """Read by the classes that Grafana makes from its schema and written again, nothing is lost: a key that Grafana does not know
    would be. No Grafana can be had from PyPI, npm or Debian, so none has opened it here."""
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def again(found: dict[str, Any]) -> Any:
        return json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(found)))

    written = grafana.dashboard()
    assert lost(written, again(written)) == []
    panel = copy.deepcopy(written)
    panel["panels"][3]["fieldConfig"]["defaults"]["custom"]["line_width"] = 1
    panel["panels"][3]["gridpos"] = {}
    assert len(lost(panel, again(panel))) == 2, "it tells what it does not know"


def lost(before: Any, after: Any, place: str = "") -> list[str]:
    """Places of what is not there any more, or is something else."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key in before for each in lost(before[key], after.get(key), f"{place}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            each for at, (one, other) in enumerate(zip(before, after)) for each in lost(one, other, f"{place}[{at}]")
        ]
    return [] if before == after else [place]


def test_the_dashboard_has_every_chart_of_metrics() -> None:
    panels = grafana.dashboard()["panels"]
    assert {chart.title for chart in CHARTS if chart.metrics} <= {panel["title"] for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))


def test_a_dashboard_that_is_old_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(grafana, "PAGE", tmp_path / "dashboards" / "trimtab.json")
    assert grafana.main(["--check"]) == 1
    assert "python -m trimtab.observe.grafana" in capsys.readouterr().out
    assert grafana.main([]) == 0
    assert grafana.main(["--check"]) == 0
