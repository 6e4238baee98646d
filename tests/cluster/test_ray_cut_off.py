"""Two hosts, which are network namespaces, joined in one Ray cluster: a run over both; one is cut off in mid-step and named
within 20 s; the run resumes when it returns, and without it. And a run that is stopped ends everything on both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.running import wait_for
from trimtab.record.checkpoint import newest_checkpoint

ROOT = Path(__file__).parents[2]
CUT_NAMED_S = 20.0
START_S, END_S = 240.0, 400.0
STORE = "--object-store-memory=83886080"
RAY = Path(sys.executable).with_name("ray")
CAN = shutil.which("ip") is not None and os.geteuid() == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CAN, reason="network namespaces need root and the program ip"),
]
REWARDS = """
import time

def letters(completions, **_):
    time.sleep(0.3)
    return [float(sum(c in "abcdefghij" for c in text)) for text in completions]
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """Two namespaces and a wire between them: the first has Ray's head and the driver."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, uuid.uuid4().hex[:6]
        self.spaces = [f"tt{self.name}{number}" for number in range(2)]
        self.ray: dict[int, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        for space in self.spaces:
            ip("netns", "add", space)
        ip(
            "link",
            "add",
            "wire0",
            "netns",
            self.spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            "wire1",
            "netns",
            self.spaces[1],
        )
        for number, space in enumerate(self.spaces):
            ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"wire{number}")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", f"wire{number}", "up")

    def wire(self, state: str) -> None:
        ip("-n", self.spaces[1], "link", "set", "wire1", state)

    def command(self, number: int, *command: object, log: str) -> subprocess.Popen[bytes]:
        """A program on a host."""
        line = ["ip", "netns", "exec", self.spaces[number], *map(str, command)]
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def start_ray(self, number: int) -> None:
        """Ray on a host, unless it is there and was not given up."""
        if number in self.ray and self.ray[number].poll() is None:
            return
        where = (
            ["--head", "--port=6379", f"--temp-dir=/tmp/tt-{self.name}"] if not number else ["--address=10.77.0.1:6379"]
        )
        more = ["--include-dashboard=false", "--disable-usage-stats"] if not number else []
        address = f"--node-ip-address=10.77.0.{number + 1}"
        log = f"ray-{number}-{len(self.ray)}.log"
        self.ray[number] = self.command(
            number, RAY, "start", *where, *more, address, "--num-cpus=1", STORE, "--block", log=log
        )
        assert wait_for(lambda: "Ray runtime started" in (self.folder / log).read_text(), START_S)

    def train(self, name: str, *changes: str) -> subprocess.Popen[bytes]:
        return self.command(
            0, sys.executable, "-m", "trimtab", "train", "config.yaml", f"observe.dir={self.folder / name}", *changes,
            log=f"{name}.log",
        )  # fmt: skip

    def close(self) -> None:
        for process in self.ray.values():
            process.terminate()
        for process in self.ray.values():
            process.wait(60)
        for space in self.spaces:
            ip("netns", "delete", space)
        shutil.rmtree(f"/tmp/tt-{self.name}", ignore_errors=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    words = ("12+34=", "7+8=", "reverse abcdef=", "sort 40213=", "9+99=")
    rows = "".join(f'{{"prompt": "{word}"}}\n' for word in words)
    (folder / "train.jsonl").write_text(rows)
    (folder / "rewards.py").write_text(REWARDS)
    learn = {"steps": 8, "prompts_per_step": 5, "samples_per_prompt": 3, "max_new_tokens": 8, "lr": 1e-2, "seed": 3}
    config = {
        "model": {"path": str(model_folder)},
        "data": {"train": str(folder / "train.jsonl")},
        "reward": [{"fn": "rewards.py:letters"}],
        "learn": learn,
        "run": {"device": "cpu", "devices": 2, "shard": "optimizer", "reward_workers": 1, "threads": 1},
        "observe": {"checkpoint_every": 1, "tensorboard": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    try:
        found = Hosts(folder)
    except subprocess.CalledProcessError as error:  # in a container without the right to
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        found.start_ray(0)
        yield found
    finally:
        found.close()


def after_steps(hosts: Hosts, run: subprocess.Popen[bytes], name: str, steps: int) -> None:
    rows = hosts.folder / name / "metrics.jsonl"

    def there() -> bool:
        assert run.poll() is None, (hosts.folder / f"{name}.log").read_text()[-2000:]
        return rows.exists() and rows.read_text().count("\n") >= steps

    assert wait_for(there, START_S)


def cut_off(hosts: Hosts, run: subprocess.Popen[bytes], name: str) -> None:
    """Cut the second host off after two steps; it is named in time."""
    log = hosts.folder / f"{name}.log"
    after_steps(hosts, run, name, 2)
    hosts.wire("down")
    cut = time.monotonic()
    assert wait_for(lambda: "is lost" in log.read_text(), CUT_NAMED_S + 5)
    assert time.monotonic() - cut < CUT_NAMED_S
    assert "rank 1 on" in log.read_text() and "(10.77.0.2) has not answered for 15 s" in log.read_text()


def weights(hosts: Hosts, name: str) -> bytes:
    return (hosts.folder / name / "final/model.safetensors").read_bytes()


def test_a_host_that_is_cut_off_is_named_and_the_run_resumes_when_it_returns(hosts: Hosts) -> None:
    hosts.start_ray(1)
    run = hosts.train("back", "run.cluster=10.77.0.1:6379", "run.wait_for_hosts=120")
    cut_off(hosts, run, "back")
    hosts.wire("up")
    assert run.wait(END_S) == 0
    local = hosts.train("local", "run.cluster=local")
    assert local.wait(START_S) == 0
    assert weights(hosts, "back") == weights(hosts, "local"), "on two ranks again, and as if nothing had been"


def test_a_run_that_is_stopped_leaves_a_checkpoint_and_no_process(hosts: Hosts) -> None:
    hosts.start_ray(1)
    run = hosts.train("stopped", "run.cluster=10.77.0.1:6379", "observe.checkpoint_every=100")
    after_steps(hosts, run, "stopped", 2)
    run.terminate()
    run.wait(60)
    assert newest_checkpoint(hosts.folder / "stopped") is not None
    assert wait_for(lambda: not _ranks_of(hosts), 10)


def test_without_the_host_the_run_is_planned_anew(hosts: Hosts) -> None:
    hosts.start_ray(1)
    run = hosts.train("without", "run.cluster=10.77.0.1:6379", "run.wait_for_hosts=5")
    cut_off(hosts, run, "without")
    assert run.wait(END_S) == 0
    hosts.wire("up")
    said = (hosts.folder / "without.log").read_text()
    assert "the run is planned anew for 1" in said and "step 8/8" in said
    assert wait_for(lambda: not _ranks_of(hosts), 90), "the rank on the lost host has ended too"


def _ranks_of(hosts: Hosts) -> list[str]:
    """Processes of ranks on both hosts."""
    pids = [
        pid
        for space in hosts.spaces
        for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
    ]
    lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return [str(line) for line in lines if line.exists() and b"trimtab.run.rank" in line.read_bytes()]
