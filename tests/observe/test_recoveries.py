"""What was survived is counted, told at once, and kept for the trace."""

from __future__ import annotations

from trimtab.observe.recoveries import Recoveries
from trimtab.record.checkpoint import RunState
from trimtab.update.guard import Recovery


def test_what_is_survived_is_told_counted_and_kept_for_the_trace() -> None:
    state, said, kinds, times = RunState(step=4), list[str](), list[str](), iter(range(9))

    def warn(line: str, kind: str) -> None:
        said.append(line)
        kinds.append(kind)

    found = Recoveries(state, warn, clock=lambda: float(next(times)))
    found.of_engine("out of memory in prefill")
    found.of_policy(Recovery("forward", "token_budget 8 -> 4"))
    found.of_policy(Recovery("the allocator had a hard time", "token_budget 4 -> 2", replayed=False))
    found.of_critic(Recovery("backward", "token_budget 8 -> 4"))
    found.restarted("vLLM was started again")
    assert state.oom_recoveries == found.count == 3
    assert said == [
        "step 5: out of memory in prefill",
        "step 5: out of memory in forward; token_budget 8 -> 4, replayed",
        "step 5: the allocator had a hard time; token_budget 4 -> 2",
        "step 5: critic: out of memory in backward; token_budget 8 -> 4, replayed",
        "step 5: vLLM was started again",
    ]
    assert kinds == ["recovery"] * 4 + ["engine"]
    names = ["out of memory", "out of memory", "memory is short", "out of memory", "engine restarted"]
    assert [(name, at) for name, at, _ in found.take()] == list(zip(names, range(5)))
    assert found.take() == []
