"""What a person sees, by value; and that nothing a run can produce breaks it."""

import io
import math
from dataclasses import replace

import pytest

from trimtab.observe.card import StartCard, is_unusual, rollout_batch
from trimtab.observe.console import Console, summary_facts
from trimtab.observe.panel import panel_facts

STEP = {
    "reward/mean": 0.4312,
    "reward/std": 0.489,
    "response/length_mean": 213.2,
    "response/truncated": 0.031,
    "throughput/tokens_per_s": 18_234.0,
    "policy/entropy": 0.43,
    "policy/kl_ref": 0.0021,
    "memory/rollout_peak_gib": 40.0,
    "memory/update_peak_gib": 61.2,
    "memory/device_total_gib": 139.0,
    "memory/host_gib": 7.3,
    "time/rollout": 1.886,
    "time/reward": 0.06,
    "time/update": 1.09,
    "time/publish": 0.01,
    "time/idle": 0.04,
    "time/total": 3.086,
}
CARD = StartCard(
    run_dir="runs/a",
    model="Qwen/Qwen2.5-0.5B-Instruct",
    parameters=494_032_768,
    dtype="bfloat16",
    device="NVIDIA H200",
    algorithm="grpo",
    batch=rollout_batch(32, 16, 512, 1),
    data_rows=7473,
    eval_rows=1319,
    device_peak_gib=61.2,
    device_total_gib=139.8,
    host_total_gib=128.0,
    choices=[
        ("run.token_budget", 65536, "fits [beside] the optimizer"),
        ("run.offload.optimizer", False, "it fits"),
        ("run.offload.reference", True, "it does not fit"),
        ("run.engine", "native", "shares the trainer's weights"),
    ],
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def out():
    return io.StringIO()


def shown(out):
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_step_is_one_plain_line_where_there_is_no_terminal(out):
    console = Console(200, file=out)
    console.step(12, STEP)
    assert out.getvalue() == (
        "step 12/200 | reward 0.431 ±0.49 | len 213 | 18.2k tok/s | "
        "3.1 s (rollout 61% reward 2% update 35% idle 1%) | ETA 9m 40s\n"
    )


def test_a_measured_peak_stands_beside_its_prediction(out):
    console = Console(200, file=out)
    console.step(12, STEP | {"memory/update_peak_gib": 18.66, "memory/update_predicted_gib": 18.75})
    assert "| update peak 18.7 GiB, predicted 18.8 GiB | ETA 9m 40s" in out.getvalue()
    assert "(update 18.7 GiB, predicted 18.8 GiB)" in dict(panel_facts(console.history))["memory"]


def test_missing_and_non_finite_metrics_are_dashes(out):
    console = Console(10, file=out)
    console.step(1, {})
    console.step(2, dict.fromkeys(STEP, math.nan))
    console.step(3, dict.fromkeys(STEP))
    assert shown(out) == [f"step {i}/10 | reward - ±- | len - | - tok/s | - | ETA -" for i in (1, 2, 3)]


def test_time_left_ignores_the_first_step_and_ends_at_zero(out):
    console = Console(10, file=out)
    for step, seconds in [(1, 60.0), (2, 2.0), (3, 4.0), (10, 3.0)]:
        console.step(step, {"time/total": seconds})
    assert [line.split("ETA ")[1] for line in shown(out)] == ["9m 00s", "16 s", "21 s", "0 s"]


def test_eval_note_and_warning_are_lines_and_never_markup(out):
    console = Console(10, file=out)
    console.eval(5, {"eval/pass@1": 0.412, "eval/pass@8": 0.7})
    console.note("kept [bold]step-5[/bold] :smile: " + "x" * 200)
    console.warn("3% of rewards failed [timeout]")
    assert shown(out) == [
        "eval at step 5 | pass@1 41.2%, pass@8 70.0%",
        "kept [bold]step-5[/bold] :smile: " + "x" * 200,
        "warning: 3% of rewards failed [timeout]",
    ]


def test_the_card_states_every_size_with_its_unit():
    assert CARD.facts() == [
        ("model", "Qwen/Qwen2.5-0.5B-Instruct, 494.0M parameters, bfloat16"),
        ("device", "NVIDIA H200"),
        ("algorithm", "grpo"),
        ("batch", "32 prompts × 16 samples = 512 sequences per step"),
        ("tokens", "up to 262,144 new tokens per step (512 per sequence)"),
        ("updates", "1 per batch (on-policy)"),
        ("data", "7,473 training rows, 1,319 evaluation rows"),
        ("memory", "device 61.2 GiB predicted peak of 139.8 GiB"),
        ("", "host 128.0 GiB total"),
        ("run folder", "runs/a"),
    ]


def test_the_card_shows_the_choices_that_are_not_usual_with_their_reasons(out):
    Console(10, file=out).card(CARD)
    text = out.getvalue()
    assert "512 sequences per step" in text
    assert any(line.split()[1:3] == ["run.token_budget", "65,536"] for line in shown(out))
    assert "fits [beside] the optimizer" in text
    assert any(line.split()[1:3] == ["run.offload.reference", "True"] for line in shown(out))
    assert "run.engine" not in text and "run.offload.optimizer" not in text
    assert "2 other run choices have their usual values; --verbose shows them" in text


def test_verbose_shows_every_choice(out):
    Console(10, file=out).card(CARD, verbose=True)
    assert all(key in out.getvalue() for key, _, _ in CARD.choices)
    assert "usual values" not in out.getvalue()


def test_on_a_cpu_there_is_little_to_tell(out):
    card = replace(CARD, device="CPU", device_peak_gib=None, device_total_gib=None)
    assert [c[0] for c in card.choices if is_unusual(c[0], c[1], card.on_cpu)] == ["run.offload.reference"]
    assert [line for line in card.facts() if line[0] in ("memory", "")] == [("memory", "host 128.0 GiB total")]
    plain = replace(card, choices=card.choices[:2])
    Console(10, file=out).card(plain)
    assert "run choice  " not in out.getvalue() and "2 run choices have their usual values" in out.getvalue()


def test_an_engine_that_could_not_be_had_is_told(out):
    again = ("run.engine", "native", "vllm was planned: it does not start")
    Console(10, file=out).card(replace(CARD, choices=[*CARD.choices, again]))
    assert "vllm was planned" in out.getvalue()


def test_the_card_of_a_small_resumed_lora_run(out):
    sizes = {"batch": rollout_batch(2, 4, 8, 3), "data_rows": 10}
    card = StartCard(
        "runs/b",
        "tiny",
        7_000_000_000,
        "float32",
        "cpu",
        "dapo",
        **sizes,
        trainable_parameters=2_000_000,
        resumed_from=40,
    )
    facts = dict(card.facts())
    assert facts["model"] == "tiny, 7.0B parameters (2.0M trained), float32"
    assert facts["updates"] == "3 per batch"
    assert facts["data"] == "10 training rows, no evaluation set"
    assert facts["memory"] == "host -"
    assert facts["resumed"] == "after step 40"
    Console(10, file=out).card(card)
    assert "run choice" not in out.getvalue()


def test_finish_adds_up_the_phases_of_the_session(out):
    console = Console(2, file=out)
    console.step(1, {"time/rollout": 30.0, "time/update": 9.0, "time/idle": 1.0, "time/total": 40.0})
    console.step(2, {"time/rollout": 42.0, "time/update": 15.0, "time/idle": 3.0, "time/total": 60.0})
    console.finish({"reward_first": 0.2, "reward_last": 0.75, "eval": {"pass@1": 0.69}, "tokens_per_s": 18234.0})
    text = shown(out)
    assert "Where the time went (2 steps):" in text
    rows = {line.split()[0]: line.split("█")[0].split()[1:] for line in text if line}
    assert rows["rollout"] == ["1m", "12s", "36", "s", "72%"]
    assert rows["update"] == ["24", "s", "12", "s", "24%"]
    assert rows["idle"] == ["4.0", "s", "2.0", "s", "4%"]
    assert rows["total"] == ["1m", "40s", "50", "s", "100%"]
    assert "score" not in rows
    assert text[-3:] == ["reward      0.200 → 0.750", "eval        pass@1 69.0%", "throughput  18.2k tok/s"]


def test_the_summary_leaves_nothing_out():
    facts = summary_facts(
        {
            "run_dir": "runs/a",
            "steps": 200,
            "peak_gib": 61.0,
            "seconds": 820,
            "eval": {"before": None, "after": None},
            "reward_last": math.nan,
            "x": 1,
        }
    )
    assert facts == [
        ("reward", "- → -"),
        ("steps", "200"),
        ("peak memory", "61.0 GiB"),
        ("time", "13m 40s"),
        ("run folder", "runs/a"),
        ("x", "1"),
    ]
    assert summary_facts({"eval": 0.5}) == [("eval", "pass@1 50.0%")]
    assert summary_facts({"eval": {"before": 0.1, "after": None}}) == [("eval", "pass@1 10.0% → -")]
    scored = {"before": -0.25, "after": 1.5, "measure": "score"}
    assert summary_facts({"eval": {"before": None, "after": None, "measure": "score"}}) == []
    assert summary_facts({"eval": scored}) == [("eval", "score -0.250 → 1.500")], "no share of anything"
    assert summary_facts({"eval": {"loss before": None, "loss after": None}}) == [], "there is no evaluation set"
    assert summary_facts({}) == []


def test_the_summaries_of_other_stages_have_no_endless_numbers():
    facts = summary_facts(
        {
            "run_dir": "runs/a",
            "loss_first": 0.6931471824,
            "loss_last": 0.5,
            "accuracy": 0.725,
            "score_std": 0.0060895881,
        }
    )
    assert facts == [("loss", "0.693 → 0.500"), ("accuracy", "0.725"), ("score std", "0.006"), ("run folder", "runs/a")]


def test_finish_without_a_single_step(out):
    Console(5, file=out).finish({"steps": 0})
    assert [line for line in shown(out) if line] == ["steps  0"]


def test_panel_lines_carry_their_units(out):
    console = Console(200, file=out)
    console.step(11, STEP | {"reward/mean": 0.2})
    console.step(12, STEP)
    console.eval(10, {"eval/pass@1": 0.4})
    assert panel_facts(console.history) == [
        ("reward", "0.431 ±0.49  ▁█"),
        ("response", "213 tokens"),
        ("truncated", "3.1% of responses"),
        ("throughput", "18.2k tok/s"),
        ("entropy", "0.430 nats per token"),
        ("KL to ref.", "0.0021 nats per token"),
        ("memory", "device peak 61.2 GiB, host 7.30 GiB"),
        ("eval", "pass@1 40.0% (step 10)"),
    ]


def test_a_terminal_gets_the_live_panel_and_the_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with Console(200, file=out, clock=lambda: 0.0) as console:
        console.working("rollout")
        console.step(12, STEP)
        console.note("a note above the panel")
    text = out.getvalue()
    for part in ("step 12/200", "ETA 9m 40s", "now: rollout", "nats per token", "61%", "a note above the panel"):
        assert part in text
    assert "| len 213 |" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_live_panel_with_nothing_known_yet_renders(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Console(5, file=out) as console:
        console.working("rollout")
        console.step(1, {})
    assert "step 1/5" in out.getvalue()


def test_an_ascii_stream_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = Console(200, file=stream)
    console.card(CARD)
    console.step(12, STEP)
    console.finish({"reward_first": 0.1, "reward_last": 0.2})
    assert b"reward 0.431 \\xb10.49" in raw.getvalue()
