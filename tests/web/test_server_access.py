"""Who may ask: names, tokens, origins; and what no request can reach."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.web.serving import Client, command, serving, write_run
from trimtab.observe.web.server.files import inside

SECRET = "the secret of another folder"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a")
    return tmp_path / "runs"


def test_names_that_are_not_known_are_refused(runs: Path) -> None:
    with serving(runs, names=("proxy.example",)) as server:
        port = server.port
        for host in (
            f"127.0.0.1:{port}",
            f"localhost:{port}",
            "LOCALHOST",
            "[::1]:8080",
            "10.0.0.7",
            "proxy.example:443",
        ):
            assert server.ask("/api/runs", host=host).status == 200, host
        evil = (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "",
            "a b",
            "127.0.0.1/x",
        )
        for host in evil:
            answer = server.ask("/api/runs", host=host)
            assert answer.status in (400, 421), host
            assert b'"runs"' not in answer.body


def test_pages_of_other_origins_cannot_ask_for_a_plan(runs: Path) -> None:
    with serving(runs) as server:
        own = {"host": f"localhost:{server.port}"}
        body = {"run": "a", "device": "h200"}
        right = server.ask("/api/plan", "POST", body, origin=f"http://localhost:{server.port}", **own)
        assert right.status == 200, right.body
        assert server.ask("/api/plan", "POST", body, **own).status == 200  # curl
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port}", "http://localhost:1"):
            assert server.ask("/api/plan", "POST", body, origin=origin, **own).status == 403, origin
        assert server.ask("/api/plan", "POST", body, sec_fetch_site="cross-site", **own).status == 403
        form = server.ask("/api/plan", "POST", json.dumps(body).encode(), content_type="text/plain", **own)
        assert form.status == 415


def test_nothing_is_shared_with_other_origins_and_nothing_can_be_changed(runs: Path) -> None:
    with serving(runs) as server:
        for path in ("/", "/api/runs", "/api/runs/a", "/nothing", "/healthz"):
            answer = server.ask(path, origin="http://evil.example")
            assert not any(name.startswith("access-control") for name in answer.headers)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            assert server.ask("/api/runs/a", method).status == 405
        assert server.ask("/api/runs/a", "POST", {}).status == 405
        assert server.ask("/api/runs", "HEAD").status == 200
        shell = server.ask("/").body.decode()
        assert (
            "<script>" not in shell
            and "style=" not in shell
            and " on" not in shell.split("<body>")[1].split("<noscript>")[0]
        )


def test_beyond_this_machine_a_token_is_needed(runs: Path) -> None:
    token = "0123456789abcdef0123"
    with command(runs, "--host", "0.0.0.0", TRIMTAB_SERVE_TOKEN=token) as server:
        assert server.address.endswith(f"/?token={token}")
        for path in ("/", "/api/runs", "/api/runs/a/events", "/metrics", "/assets/app.js", "/api/runs?token=wrong"):
            assert server.ask(path).status == 401, path
        assert server.ask("/api/plan", "POST", {"run": "a"}).status == 401
        assert server.ask("/healthz").status == 200
        first = server.ask(f"/?token={token}&x=1")
        assert (first.status, first.headers["location"]) == (303, "/?x=1")
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        held = Client(server.port, {"cookie": cookie.split(";")[0]})
        assert held.ask("/api/runs").status == 200
        assert server.ask("/api/runs", cookie=f"trimtab_{server.port}=wrong").status == 401
        assert server.ask("/metrics", authorization=f"Bearer {token}").status == 200
        assert held.ask("/api/runs", host="evil.example").status == 421
        away = server.ask(f"//evil.example/?token={token}")
        assert away.headers.get("location", "/x").startswith("/") and not away.headers.get("location", "/x").startswith(
            "//"
        )


def test_a_random_token_is_made(runs: Path) -> None:
    with command(runs, "--host", "0.0.0.0") as server:
        token = server.address.partition("token=")[2]
        assert len(token) >= 32
        assert server.ask(f"/?token={token}").status == 303


def test_no_path_leads_out(runs: Path) -> None:
    (runs.parent / "secret.txt").write_text(SECRET)
    (runs / "a" / "final").mkdir()
    (runs / "a" / "final" / "model.safetensors").write_text(SECRET)
    (runs / "a" / "checkpoints" / "step-1").mkdir(parents=True)
    (runs / "a" / "checkpoints" / "step-1" / "config.yaml").write_text(SECRET)
    with serving(runs) as server:
        assert [run["id"] for run in server.ask("/api/runs").json["runs"]] == ["a"]
        for path in (
            "/../secret.txt", "/assets/../../secret.txt", "/assets/%2e%2e/%2e%2e/secret.txt", "/assets/..%2f..%2fsecret.txt",
            "/assets/__init__.py", "/assets/data.py", "/api/runs/..", "/api/runs/%2e%2e/samples?step=1", "/api/runs/a%2f..%2fa",
            "/api/runs/a~final", "/api/runs/a/final/model.safetensors", "/api/runs/a/samples?step=1&kind=../..", "/api/runs/a%00",
            "/api/runs/a/samples?step=..%2f..%2fsecret", "/api/runs/a/samples?step=1e400", "/api/runs/a/samples?step=-1",
            f"/api/runs/{'a' * 5000}", "/api/runs/%ff%fe", "/api/compare?runs=../secret.txt", "/.env", "//etc/passwd",
        ):  # fmt: skip
            answer = server.ask(path)
            assert answer.status in (400, 404, 405, 422), (path, answer.status)
            assert SECRET.encode() not in answer.body


def test_links_that_leave_the_folder_are_ignored(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "a")
    write_run(tmp_path / "elsewhere")
    (tmp_path / "secret.jsonl").write_text(json.dumps({"step": 1, "completion": SECRET}) + "\n")
    (runs / "link").symlink_to(tmp_path / "elsewhere")
    (runs / "loop").symlink_to(runs)
    (runs / "again").symlink_to(runs / "a")
    write_run(runs / "b")
    (runs / "b" / "metrics.jsonl").unlink()
    (runs / "b" / "metrics.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (runs / "a" / "samples").mkdir()
    (runs / "a" / "samples" / "step-1.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(runs / "a" / "samples" / "step-2.jsonl")
    with serving(runs) as server:
        ids = [run["id"] for run in server.ask("/api/runs").json["runs"]]
        assert ids in (["a"], ["again"])  # one folder, one run
        assert server.ask("/api/runs/b").status == 404
        for step in (1, 2):
            assert server.ask(f"/api/runs/{ids[0]}/samples?step={step}").status == 404
        found = server.ask(f"/api/runs/{ids[0]}/search?q=secret").json
        assert (found["rows"], found["cursor"]) == ([], None)
    assert not inside(runs / "link" / "metrics.jsonl", runs)


def test_hostile_names_become_harmless_ids(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    names = ["<script>alert(1)</script>".replace("/", "|"), "a b", "a..b", "ü", "x" * 200, "a~b", "new\nline", "%2e%2e"]
    for name in names:
        write_run(runs / name)
    write_run(runs / "project" / "day" / "run")
    os.rename(write_run(runs / "bytes"), os.fsencode(runs) + b"/\xff\xfe")
    write_run(runs / "1" / "2" / "3" / "too-deep")
    with serving(runs) as server:
        listed = server.ask("/api/runs").json["runs"]
        assert len(listed) == len(names) + 2
        assert "project~day~run" in [run["id"] for run in listed]
        for run in listed:
            assert set(run["id"]) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._~-")
            assert server.ask(f"/api/runs/{run['id']}/metrics").status == 200


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is a file, not a folder"),
        (lambda path: write_run(path) and None, None),
    ],
    ids=["missing", "file", "a run itself"],
)
def test_the_folder(tmp_path: Path, make, says) -> None:
    from trimtab.base.errors import DataError
    from trimtab.observe.web.server.scan import RunTable

    make(tmp_path / "x")
    if says is None:
        assert list(RunTable(tmp_path / "x").runs()) == ["x"]
    else:
        with pytest.raises(DataError, match=says):
            RunTable(tmp_path / "x")
