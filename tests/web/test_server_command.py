"""`trimtab serve`: what it says of a bad folder, a taken port, a wrong host, and packages that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.web.serving import command, write_run
from trimtab.base.errors import ConfigError
from trimtab.cli import app
from trimtab.observe.web.server.command import address, listen, refuse_without_packages


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    return done.stderr


def test_a_folder_that_holds_no_runs_is_told(tmp_path: Path) -> None:
    assert "RUNS_DIR" in refused(str(tmp_path / "none"))
    run = write_run(tmp_path / "run")
    inner = run / "checkpoints" / "step-1"
    inner.mkdir(parents=True)
    assert f"trimtab serve {run}" in refused(str(inner))


def test_a_taken_port_and_a_wrong_host_are_told(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        said = refused(str(tmp_path), "--port", str(port))
        assert f"port {port} of 127.0.0.1 cannot be used" in said and f"--port {port + 1}" in said
    with pytest.raises(ConfigError, match="--host"):
        listen("no-such-host.invalid", 0)
    with pytest.raises(ConfigError, match="--port"):
        listen("192.0.2.1", 0)  # nobody's address


def test_a_short_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_SERVE_TOKEN", "short")
    assert "TRIMTAB_SERVE_TOKEN" in refused(str(tmp_path), "--host", "0.0.0.0", "--port", "0")


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uvicorn", "starlette", "prometheus_client"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ConfigError, match=r"trimtab\[serve\]"):
                refuse_without_packages()


def test_addresses() -> None:
    assert address("127.0.0.1", 6070, None) == "http://127.0.0.1:6070/"
    assert address("::1", 1, "t") == "http://[::1]:1/?token=t"
    assert "0.0.0.0" not in address("0.0.0.0", 1, "t")


def test_serving_loads_no_torch_and_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    with command(tmp_path / "runs") as server:
        for path in ("/", "/api/runs", "/api/runs/a", "/api/runs/a/metrics", "/api/compare?runs=a", "/metrics"):
            assert server.ask(path).status == 200, path
        assert server.ask("/api/plan", "POST", {"run": "a", "device": "h200"}).status == 200
        maps = Path(f"/proc/{server.process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    assert run.exists()
