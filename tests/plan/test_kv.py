"""The KV cache that is planned for a whole step holds it: the engine's own scheduler runs all sequences at once, parking none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_planner import h, qwen
from trimtab.config.run import Rollout, Run
from trimtab.plan.job import Machine
from trimtab.plan.kv import kv_bytes, step_kv_bytes
from trimtab.plan.ledger import GIB
from trimtab.plan.planner import make_plan
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.scheduler import PromptGroup, Scheduler

RUN = Run(engine="native")


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 5, 16, 64, 80]),
    st.data(),
)  # fmt: skip
def test_all_sequences_of_a_step_run_at_once(
    prompts: int, samples: int, longest: int, completion: int, page: int, data: st.DataObject
) -> None:
    job = qwen(prompts=prompts, samples=samples, longest_prompt=longest, typical_prompt=longest, completion=completion)
    page_bytes = page * job.shape.kv_elements * job.itemsize
    pool = PagePool(step_kv_bytes(job, RUN, job.sequences, page) // page_bytes, page, prefix_cache=False)
    work = Scheduler(pool, job.sequences, prefill_tokens=data.draw(st.sampled_from([7, 10_000])))
    for index in range(prompts):
        length = data.draw(st.integers(1, longest))
        work.add(PromptGroup(index, list(range(length)), [completion] * samples))
    started: list[object] = []
    while work.waiting or work.filling or work.ready:
        chosen = work.next_fill()
        for filling, tokens in chosen:
            work.filled(filling, tokens)
        forks = work.fork()
        started += forks
        assert chosen or forks, "a prompt waits for pages"
    assert len(started) == job.sequences == len(work.running)
    for _ in range(completion):
        live = work.live()
        assert not live or work.make_room(live) == []
        for sequence in live:
            sequence.stored += 1
    assert all(sequence.stored == sequence.most_stored for sequence in work.running)


def test_prompts_are_counted_once_for_their_samples() -> None:
    """SmolLM2 with short sequences had twice what a step needs: a page for each sequence, and one more for each."""
    job = qwen("smollm2-135m", itemsize=4, prompts=4, samples=8, longest_prompt=64, typical_prompt=64, completion=64)
    cpu = Machine(h(16).device, 1, 16 * GIB, 2, cpu=True)
    plan = make_plan(RUN, job, cpu)
    whole = job.sequences * job.typical_sequence * job.shape.kv_elements * job.itemsize
    assert plan.run.rollout.page_tokens == 128 and whole < plan.run.rollout.kv_memory < 1.25 * whole
    long = qwen(longest_prompt=512, typical_prompt=512)
    found = make_plan(RUN, long, h(140)).run.rollout.kv_memory
    assert found < 0.7 * kv_bytes(long, long.in_flight, long.typical_sequence, 64)


def test_what_shares_no_prompt_is_counted_whole() -> None:
    for run, job in ((Run(engine="vllm"), qwen()), (RUN, qwen(environment=True)), (RUN, qwen(samples=1, prompts=512))):
        page = 16
        least = job.sequences * job.typical_sequence * job.shape.kv_elements * job.itemsize
        assert step_kv_bytes(job, run, job.sequences, page) >= least
    several = qwen(eval_sequences=512, eval_completion=512)
    assert step_kv_bytes(several, RUN, 512, 16) > step_kv_bytes(qwen(), RUN, 512, 16)


def test_the_predicted_batch_is_what_the_cache_holds() -> None:
    """Time is predicted with the same count as memory: a cache for the whole step runs all of it at once."""
    whole, half = (
        make_plan(Run(engine="native", rollout=Rollout(kv_memory=size)), qwen(), h(140))
        for size in (
            step_kv_bytes(qwen(), RUN, qwen().in_flight, 64),
            step_kv_bytes(qwen(), RUN, qwen().in_flight, 64) // 2,
        )
    )
    assert whole.times.rollout == make_plan(RUN, qwen(), h(140)).times.rollout < half.times.rollout
