"""The driver's end of ranks: orders and answers, collectives against plain sums, and every way in which a rank can be lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.forked_ranks import fork_ranks
from tests.running import left, wait_for
from trimtab.base.errors import DataError
from trimtab.base.spans import log
from trimtab.cluster import ranks as module
from trimtab.cluster.mesh import open_store
from trimtab.cluster.messages import Answer, Item
from trimtab.cluster.ranks import RankLost, Ranks, ShortOnRank

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
TOY = "tests.cluster.toy"


def start(folder: Path, count: int, *, meet: bool = True, prefix: str = "", variables=(), **settings) -> Ranks:
    store = open_store() if meet else None
    prefix = prefix or uuid.uuid4().hex
    ranks = Ranks(
        TOY,
        [(rank, count, store.port if store else None, prefix) for rank in range(count)],
        folder,
        variables=[{"GLOO_SOCKET_IFNAME": "lo", **dict(variables)}] * count,
        **settings,
    )
    ranks.store = store
    return ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, list[str]]]:
    """Four ranks for all tests that leave them as they were, and what they said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        ranks = start(tmp_path_factory.mktemp("logs"), 4, tell=lambda kind, text: said.append(text))
    assert ranks.wait_until_built() == [0, 1, 2, 3]
    before = psutil.Process().children(recursive=True)
    yield ranks, said
    ranks.close()
    assert not left(before, 10.0)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two ranks that a test may lose."""
    fork_ranks(monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(module, "MIN_STALL_S", 1.0)
    ranks = start(tmp_path, 2, stall_s=1.0)
    ranks.wait_until_built()
    yield ranks
    ranks.kill()
    assert not left(set(psutil.Process().children(recursive=True)) - before, 10.0)


def stream(ranks, method: str, args: dict[int, tuple]):
    """What ranks yield, as it comes; the last of each is its Answer."""
    ranks.begin(method, args)
    busy = set(args)
    while busy:
        for rank, message in ranks.hear(busy):
            if isinstance(message, Answer):
                busy.discard(rank)
            yield rank, message.value if isinstance(message, Item) else message


def test_answers_come_in_the_order_of_ranks(four) -> None:
    ranks, _ = four
    assert len(ranks) == 4
    assert ranks.ask("echo", 7) == [7] * 4
    assert ranks.ask_each("echo", [(rank * 10,) for rank in range(4)]) == [0, 10, 20, 30]
    assert ranks.call_one(2, "echo", "alone") == "alone"


def test_values_are_yielded_as_they_come_by_those_that_have_work(four) -> None:
    ranks, said = four
    found = list(stream(ranks, "count", {0: ([1, 2],), 2: ([],), 3: ([5],)}))
    values = {rank: [v for at, v in found if at == rank and not isinstance(v, Answer)] for rank in range(4)}
    assert values == {0: [1, 2], 1: [], 2: [], 3: [5]}
    assert [at for at, value in found if isinstance(value, Answer)].count(0) == 1
    assert sorted(said) == ["rank 0 counts", "rank 2 counts", "rank 3 counts"]


def test_what_a_rank_raises_for_the_user_is_raised_and_it_goes_on(four) -> None:
    ranks, _ = four
    with pytest.raises(DataError, match="rank 2 refuses"):
        ranks.ask("refuse", 2)
    assert ranks.ask("echo", 1) == [1] * 4


def test_a_rank_without_memory_says_where_it_was_once_all_have_answered(four) -> None:
    ranks, _ = four
    with pytest.raises(ShortOnRank, match="rank 3: CUDA out of memory") as caught:
        ranks.ask("run_short", 3)
    assert (caught.value.rank, caught.value.facts) == (3, "rank 3 was at step 0")
    assert ranks.ask("echo", 1) == [1] * 4


def test_answers_that_nobody_waits_for_are_not_those_to_the_next_order(four) -> None:
    """Ctrl-C in the middle of an order, after which the run is saved."""
    ranks, _ = four
    values = stream(ranks, "count", dict.fromkeys(range(4), ([1, 2, 3], 0.1)))
    next(values)
    values.close()
    assert ranks.ask("echo", "saved") == ["saved"] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait_for", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.ask("work", 0.3, True)
    assert ranks.ask("echo", "saved again") == ["saved again"] * 4


def _interrupted(processes) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("shards", [2, 4, 1])
def test_collectives_are_plain_sums(four, shards: int) -> None:
    """With sets of two, ranks 0 and 2, and 1 and 3, hold the same stretch."""
    ranks, _ = four
    ranks.ask("share", uuid.uuid4().hex, shards)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check_collectives(ranks, shards, dtype)


def check_collectives(ranks: Ranks, shards: int, dtype: torch.dtype) -> None:
    given = [(torch.arange(8.0) + 10 * rank).to(dtype) for rank in range(4)]
    whole = torch.stack(given).sum(0)
    size = 8 // shards

    def ask(name: str, values: list[torch.Tensor]) -> list[torch.Tensor]:
        return ranks.ask_each("collective", [(name, value) for value in values])

    for found in ask("sum", given):
        assert torch.equal(found, whole)
    for rank, found in enumerate(ask("sum_into_parts", given)):
        own = slice((rank % shards) * size, (rank % shards + 1) * size)
        assert torch.equal(found[own], whole[own])
    for rank, found in enumerate(ask("sum_of_parts", given)):
        first = rank - rank % shards
        assert torch.equal(found, torch.stack(given[first : first + shards]).sum(0))
    for rank, found in enumerate(ask("gather", given)):
        first = rank - rank % shards
        assert torch.equal(found, torch.cat([given[first + n][n * size : (n + 1) * size] for n in range(shards)]))


@pytest.mark.parametrize(
    ("how", "why"),
    [("killed", "killed by SIGKILL"), ("raised", "ValueError: unexpected"), ("left", "exit status 3")],
)
def test_the_rank_that_ended_is_named_and_not_the_one_that_waited_for_it(two: Ranks, how: str, why: str) -> None:
    with pytest.raises(RankLost, match=f"rank 1 is lost: .*{why}"):
        two.ask("break_off", 1, how)
    assert two.closed
    with pytest.raises(RankLost, match="have ended"):
        two.ask("echo", 1)


def test_work_that_goes_on_is_waited_for_and_work_that_stands_still_is_not(
    two: Ranks, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(log, "progress", None)
    assert two.ask("work", 3.0, True) == [0, 1]
    assert log.progress == (1, 8, "pieces"), "of both ranks together, for now.json"
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"no progress for 1 s \(waiting for rank 0, 1"):
        two.ask("work", 1000.0, False)
    assert time.monotonic() - started < 20
    assert "in work" in (tmp_path / "rank-0.log").read_text(), "stacks"


def test_a_rank_that_is_refused_while_it_is_built_ends_all_at_once(tmp_path: Path, monkeypatch) -> None:
    """The other one waits for it to join."""
    fork_ranks(monkeypatch)
    ranks, started = start(tmp_path, 2, prefix="refused"), time.monotonic()
    with pytest.raises(DataError, match="this rank has no data"):
        ranks.wait_until_built()
    assert time.monotonic() - started < 15
    assert ranks.closed


DRIVER = """
    import sys
    from pathlib import Path
    from tests.cluster.test_ranks import start, stream

    folder = Path(sys.argv[1])
    ranks = start(folder, 2, meet=False)
    ranks.wait_until_built()
    for _ in stream(ranks, "start_and_tell", {rank: (str(folder / f"pid-{rank}"),) for rank in range(2)}):
        pass
"""


@pytest.mark.timeout(300)
def test_no_rank_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    """Real interpreters, the driver's too: a fork of this process would have the locks that its threads held."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path)], env=variables, stdout=log, stderr=log
        )
    try:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        assert wait_for(lambda: all(file.exists() and file.read_text() for file in files), 200), "\n".join(
            file.read_text() for file in sorted(tmp_path.glob("*.log"))
        )
        processes = [psutil.Process(int(file.read_text())) for file in files]
    finally:
        driver.kill()
        driver.wait()
    assert not left(processes, 30.0)
