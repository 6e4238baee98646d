"""The catalogue: every chart of a run, once. Report, server, terminal, notebook and dashboards draw from it.

    for chart in charts_of("rl", "learning"): ...

A chart that a run has no value for is left out by whoever draws it. Metrics without a chart are on the page "All metrics":
`ONLY_IN_ALL_METRICS` says which, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trimtab.observe.chart import GIVEN, RL, RM, SFT, Chart, ChartLine, Page
from trimtab.observe.chart import lines as _lines
from trimtab.observe.chart import raw_and_smooth as _raw_and_smooth

NOT_PARTS = tuple(
    f"reward/{name}" for name in ("mean", "std", "zero_std_groups", "failed", "latency_max_s", "repeated")
)
"""`reward/NAME` that is no part of the reward."""
PHASES = ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle")

OVERVIEW = (
    Chart(
        "objective", "Reward and held-out score", "overview",
        (*_raw_and_smooth("reward/mean", "reward"), ChartLine("eval/pass@1", "pass@1, held out", "dots"),
         ChartLine("eval/score", "score, held out", "dots")),
        "", "Held-out scores have whiskers of 95 %. A reward that rises while they do not is a reward that is being gamed.",
        stages=(RL,),
    ),
    Chart(
        "sft_objective", "Loss, training and held out", "overview",
        (*_raw_and_smooth("sft/loss", "training"), ChartLine("eval/loss", "held out", "dots")),
        "nats a token", "A held-out loss that rises again while the training loss falls is overfitting.", stages=(SFT,),
    ),
    Chart(
        "rm_objective", "Pairs ranked right", "overview",
        (*_raw_and_smooth("rm/accuracy", "training"), ChartLine("eval/accuracy", "held out", "dots")),
        "share", "Share of pairs whose better answer has the higher score; 50 % is chance.", stages=(RM,),
    ),
    Chart(
        "phases", "Where a step goes", "overview",
        tuple(ChartLine(f"time/{name}", name) for name in PHASES),
        "s", "Seconds of every step by phase; they add up to the step.", "stack", zero=True,
    ),
    Chart("entropy", "Entropy", "overview", _lines("policy/entropy"), "nats a token",
          "Of the policy that sampled. It may fall while the reward rises; near 0 every sample is the same.",
          stages=(RL,), small=True, zero=True),
    Chart("zero_std_groups", "Groups without signal", "overview", _lines("reward/zero_std_groups=of groups"), "share",
          "Groups whose rewards are all equal: nothing is learned from them.", stages=(RL,), small=True, zero=True),
    Chart("length", "Response length", "overview", _lines("response/length_mean=mean", "response/length_p90=90th percentile"),
          "tokens", "Dashed: learn.max_new_tokens.", stages=(RL,), small=True, zero=True),
    Chart("truncated", "Truncated", "overview", _lines("response/truncated=of responses"), "share",
          "Responses that were cut off at learn.max_new_tokens.", stages=(RL,), small=True, zero=True),
    Chart("grad_norm", "Gradient norm", "overview", _lines("policy/grad_norm=before clipping"), "",
          "A spike of ten times its median is an outlier in the data or a step that was too large.", small=True, zero=True),
    Chart("logprob_gap", "Engine against trainer", "overview", _lines("rollout/logprob_gap=mean difference of log-probs"),
          "nats a token", "How far the engine's log-probs are from the trainer's.", stages=(RL,), small=True, zero=True),
    Chart("kl_ref", "KL to the reference", "overview", _lines("policy/kl_ref=to the model before training"), "nats a token",
          "KL that rises with the reward is what learning costs; KL that rises alone buys nothing.",
          stages=(RL,), small=True, zero=True),
    Chart("explained_variance", "Critic", "overview", _lines("value/explained_variance=explained variance"), "",
          "Share of the returns' variance that the critic explains: 1 is perfect, 0 as good as their mean.",
          stages=(RL,), small=True),
    Chart("lr", "Learning rate", "overview", _lines("policy/lr"), "", "As scheduled.", stages=GIVEN, small=True, zero=True),
    Chart("eval_perplexity", "Held-out perplexity", "overview", _lines("eval/perplexity", style="dots"), "",
          "exp of the held-out loss.", stages=(SFT,), small=True),
    Chart("rm_loss", "Loss", "overview", _lines("rm/loss=training", "eval/loss=held out"), "nats a pair",
          "ln 2 = 0.69 is chance.", stages=(RM,), small=True, zero=True),
    Chart("rm_difference", "Score difference", "overview", _lines("rm/difference=training", "eval/difference=held out"), "",
          "Mean score of the better answer minus that of the worse one.", stages=(RM,), small=True),
    Chart("tokens_per_s", "Tokens per second", "overview", _lines("throughput/tokens_per_s=of a whole step"), "tokens/s",
          "Tokens of a step over all of its time.", stages=GIVEN, small=True, zero=True),
    Chart("packing_small", "Packing", "overview", _lines("run/packing_fill=how full micro-batches are"), "share",
          "Tokens of a micro-batch over run.token_budget.", stages=GIVEN, small=True, zero=True),
)  # fmt: skip

LEARNING = (
    Chart("reward_parts", "Parts of the reward", "learning",
          (ChartLine(None, prefix="reward/", without=NOT_PARTS), ChartLine("reward/mean", "all, weighted", "dashed")), "",
          "Mean of each part before weighting. One part that rises at the cost of another is worth a look at the samples.",
          stages=(RL,)),
    Chart("reward_std", "Spread of rewards", "learning", _lines("reward/std=of all samples"), "", "Standard deviation.",
          stages=(RL,), zero=True),
    Chart("task_rewards", "Reward by task", "learning", (ChartLine(None, prefix="reward/task/*/mean"),), "",
          "Where data.task names tasks.", stages=(RL,)),
    Chart("groups", "Groups: all wrong, mixed, all right", "learning", (), "groups",
          "Only mixed groups teach anything. From distributions.jsonl.", "stack", stages=(RL,)),
    Chart("lengths", "Response lengths", "learning",
          _lines("response/length_p50=median", "response/length_p90=90th percentile", "response/length_max=longest"),
          "tokens", "How many responses of each length; dashed is learn.max_new_tokens. From distributions.jsonl.", "heat",
          log=True, stages=(RL,)),
    Chart("truncated_page", "Truncated responses", "learning",
          _lines("response/truncated=training", "eval/truncated=held out"), "share", "Cut off at learn.max_new_tokens.",
          stages=(RL,), zero=True),
    Chart("entropy_page", "Entropy", "learning", _lines("policy/entropy"), "nats a token", "Of the policy that sampled.",
          stages=(RL,), zero=True),
    Chart("kl", "KL to the reference, and its weight", "learning", _lines("policy/kl_ref=KL", "policy/kl_coef=weight"),
          "nats a token", "With learn.kl.coef.", stages=(RL,), zero=True),
    Chart("task_kl", "KL to the reference by task", "learning", (ChartLine(None, prefix="policy/task/*/kl_ref"),),
          "nats a token", "Healthy bands are those of observe.kl_bands.", stages=(RL,), zero=True),
    Chart("kl_old", "KL to the policy that sampled", "learning", _lines("policy/kl_old"), "nats a token",
          "How far the updates of one batch lead; 0 with one update a batch.", stages=(RL,), zero=True),
    Chart("ratio", "Policy ratio", "learning", _lines("policy/ratio_mean=mean"), "", "1 with one update a batch.",
          stages=(RL,)),
    Chart("clip", "Clipped tokens", "learning", _lines("policy/clip_fraction=of tokens"), "share",
          "Tokens whose ratio left the bounds of learn.clip.", stages=(RL,), zero=True),
    Chart("grad_norm_page", "Gradient norm", "learning", _lines("policy/grad_norm=before clipping"), "", "", zero=True),
    Chart("lr_page", "Learning rate", "learning", _lines("policy/lr"), "", "As scheduled.", zero=True),
    Chart("loss", "Policy loss", "learning", _lines("policy/loss"), "",
          "No measure of learning: it is near 0 by construction and may rise while the policy improves.", stages=(RL,)),
    Chart("gap", "Engine against trainer", "learning", _lines("rollout/logprob_gap"), "nats a token",
          "Mean difference of log-probs.", stages=(RL,), zero=True),
    Chart("routers", "Replayed routes", "learning", _lines("rollout/router_agreement"), "share",
          "Engine's choices of experts that the trainer would have made.", stages=(RL,), zero=True),
    Chart("staleness", "Age of the samples", "learning",
          _lines("rollout/version_lag=updates behind", "buffer/batches=batches that wait"), "",
          "learn.staleness says how old they are.", stages=(RL,), zero=True),
    Chart("stale_gap", "Sampling policy against the learning one", "learning", _lines("rollout/stale_gap"), "nats a token",
          "Mean difference of log-probs: updates since, and the engine's rounding.", stages=(RL,), zero=True),
    Chart("value", "Critic: explained variance", "learning", _lines("value/explained_variance"), "",
          "1 is perfect, 0 as good as a constant.", stages=(RL,)),
    Chart("value_loss", "Critic: loss", "learning", _lines("value/loss"), "", "", stages=(RL,), zero=True),
    Chart("value_means", "Critic: values and returns", "learning", _lines("value/mean=values", "value/return_mean=returns"),
          "", "They should meet.", stages=(RL,)),
    Chart("value_clip", "Critic: clipped values", "learning", _lines("value/clip_fraction=of values"), "share", "",
          stages=(RL,), zero=True),
    Chart("value_grad_norm", "Critic: gradient norm", "learning", _lines("value/grad_norm"), "", "", stages=(RL,), zero=True),
    Chart("turns", "Conversations", "learning", _lines("environment/turns_mean=turns", "environment/tool_calls=tool calls"),
          "a completion", "", stages=(RL,), zero=True),
    Chart("conversation_faults", "Conversations: what goes wrong", "learning",
          _lines("environment/turn_limit=out of turns", "environment/tool_error_share=tool calls that fail",
                 "environment/tool_malformed_share=tool calls that cannot be read"), "share", "", stages=(RL,), zero=True),
    Chart("environment_tokens", "Tokens of the environment", "learning", _lines("environment/tokens_mean=a completion"),
          "tokens", "", stages=(RL,), zero=True),
    Chart("evaluations", "Evaluations: solved", "learning", (ChartLine(None, style="dots", prefix="eval/pass@"),), "share",
          "Held-out prompts that were solved in one of K tries.", stages=(RL,), zero=True),
    Chart("eval_length", "Evaluations: length", "learning", _lines("eval/length_mean=mean", style="dots"), "tokens", "",
          stages=(RL,), zero=True),
    Chart("eval_tasks", "Evaluations by task", "learning",
          (ChartLine(None, style="dots", prefix="eval/task/*/pass@1"),
           ChartLine(None, style="dots", prefix="eval/task/*/score")), "", "",
          stages=(RL,)),
    Chart("sft_loss", "Loss", "learning", _lines("sft/loss=training", "eval/loss=held out"), "nats a token", "",
          stages=(SFT,)),
    Chart("rm_page", "Scores", "learning", _lines("rm/score_mean=mean score"), "", "Far from 0 is far from calibrated.",
          stages=(RM,)),
    Chart("learned_tokens", "Tokens that are learned", "learning", _lines("sft/tokens=a step"), "tokens", "", stages=(SFT,),
          zero=True),
)  # fmt: skip

SPEED = (
    Chart("step_time", "Seconds a step", "speed", _lines("time/total=all", "time/observe=observing"), "s",
          "What observing costs is in it.", zero=True),
    Chart("rollout_speed", "Rollout: tokens per second", "speed", _lines("rollout/tokens_per_s"), "tokens/s", "",
          stages=(RL,), zero=True),
    Chart("rollout_parts", "Rollout: prefill, decode, tail", "speed",
          _lines("rollout/prefill_s=prefill", "rollout/decode_s=decode", "rollout/tail_s=tail of decode",
                 "environment/wait_s=waiting for environments"), "s",
          "Tail: decoding with less than a quarter of the slots that could be used.", stages=(RL,), zero=True),
    Chart("rollout_use", "Rollout: slots and KV cache", "speed",
          _lines("rollout/batch_occupancy=slots in use", "rollout/kv_usage=KV pages in use",
                 "rollout/graph_share=decode steps from a graph"), "share", "", stages=(RL,), zero=True),
    Chart("rollout_work", "Rollout: tokens", "speed",
          _lines("rollout/tokens=generated", "rollout/prefill_tokens=prefilled",
                 "rollout/cached_prefix_tokens=found in the cache"), "tokens", "", stages=(RL,), zero=True),
    Chart("decode_steps", "Rollout: decode steps and slots", "speed", _lines("rollout/decode_steps", "rollout/slots"), "", "",
          stages=(RL,), zero=True),
    Chart("rollout_trouble", "Rollout: preempted, refilled, restarted", "speed",
          _lines("rollout/parked=preempted", "rollout/refills", "rollout/restarts"), "times", "", stages=(RL,), zero=True),
    Chart("update_parts", "Update: forward and backward, optimizer, offload", "speed",
          _lines("update/forward_backward_s=forward and backward", "update/optimizer_s=optimizer",
                 "update/offload_wait_s=waiting for offload"), "s", "", zero=True),
    Chart("mfu", "Update: share of the device's matrix rate", "speed", _lines("throughput/update_mfu=MFU"), "share", "",
          zero=True),
    Chart("microbatches", "Update: micro-batches", "speed", _lines("run/microbatches=number"), "", "", zero=True),
    Chart("budget", "Update: tokens of a micro-batch", "speed",
          _lines("run/token_budget=cap", "run/max_microbatch_tokens=largest"), "tokens", "", zero=True),
    Chart("packing", "Update: how full micro-batches are", "speed", _lines("run/packing_fill"), "share", "", zero=True),
    Chart("behind", "Update: device behind the host", "speed", _lines("run/device_behind"), "micro-batches",
          "Micro-batches left when the host has launched the last one; near 0 the device waits.", zero=True),
    Chart("reward_calls", "Rewards: slowest call", "speed", _lines("reward/latency_max_s=slowest call"), "s", "",
          stages=(RL,), zero=True),
    Chart("reward_trouble", "Rewards: failed and repeated", "speed",
          _lines("reward/failed=samples without a reward", "reward/repeated=calls repeated", "environment/failed"), "", "",
          stages=(RL,), zero=True),
    Chart("judge", "Judge: seconds of a request", "speed",
          (ChartLine(None, prefix="reward/*/latency_p50_s"), ChartLine(None, prefix="reward/*/latency_p95_s"),
           ChartLine(None, prefix="reward/*/wait_s")), "s", "", stages=(RL,), zero=True),
    Chart("useful", "Useful work: samples", "speed",
          (*_lines("run/samples=sampled", "run/samples_trained=trained",
                  "run/samples_without_gradient=no gradient, so no pass"), ChartLine(None, prefix="run/dropped_")), "samples",
          "Sampled = trained + dropped.", stages=(RL,), zero=True),
    Chart("throughput", "Tokens per second of a whole step", "speed", _lines("throughput/tokens_per_s"), "tokens/s", "",
          zero=True),
    Chart("checkpoints", "Checkpoints", "speed", _lines("checkpoint/wait_s=training waits", "checkpoint/write_s=being written"),
          "s", "Writing goes on behind the training.", zero=True),
    Chart("publish", "Weights sent to engines", "speed", _lines("publish/seconds=seconds"), "s",
          "To devices that only generate.", stages=(RL,), zero=True),
    Chart("ranks", "Devices: imbalance", "speed", _lines("run/rank_imbalance=busiest over mean"), "", "1 is even.", zero=False),
    Chart("communication", "Devices: communication", "speed", _lines("time/communication=seconds"), "s",
          "Seconds that the slowest rank spent in collectives; part of the phases.", zero=True),
    Chart("communication_gib", "Devices: bytes exchanged", "speed", _lines("run/communication_gib"), "GiB", "", zero=True),
    Chart("device_use", "Device: busy and clock", "speed", _lines("device/util=busy", "device/clock_share=of its highest clock"),
          "share", "A clock that falls is a device that throttles.", zero=True),
    Chart("device_power", "Device: power", "speed", _lines("device/power_w"), "W", "", zero=True),
    Chart("device_temperature", "Device: temperature", "speed", _lines("device/temperature_c"), "°C", "", zero=True),
)  # fmt: skip

MEMORY = (
    Chart("update_memory", "Update: measured and predicted", "memory",
          (ChartLine("memory/update_peak_gib", "measured"), ChartLine("memory/update_predicted_gib", "predicted", "dashed"),
           ChartLine("memory/optimizer_peak_gib", "optimizer step")), "GiB", "", zero=True),
    Chart("rollout_memory", "Rollout: measured and predicted", "memory",
          (ChartLine("memory/rollout_peak_gib", "measured"),
           ChartLine("memory/rollout_predicted_gib", "predicted", "dashed")), "GiB", "",
          stages=(RL,), zero=True),
    Chart("prediction", "Predicted over measured", "memory", _lines("memory/predicted_over_measured"), "",
          "1 is exact; below it the run takes more than planned."),
    Chart("device_memory", "Device", "memory",
          (*_lines("memory/device_used_gib=in use, by the driver", "memory/reserved_peak_gib=reserved by torch"),
           ChartLine("memory/device_total_gib", "all there is", "dashed")), "GiB", "", zero=True),
    Chart("phase_memory", "Peak of each phase", "memory",
          _lines("memory/rollout_peak_gib=rollout", "memory/reward_peak_gib=reward", "memory/score_peak_gib=score",
                 "memory/update_peak_gib=update", "memory/optimizer_peak_gib=optimizer", "memory/publish_peak_gib=publish",
                 "memory/checkpoint_peak_gib=checkpoint", "memory/eval_peak_gib=evaluation"), "GiB", "", zero=True),
    Chart("host_memory", "Host", "memory", _lines("memory/host_gib=all processes", "memory/host_left_gib=left"), "GiB", "",
          zero=True),
    Chart("host_slope", "Host: growth", "memory", _lines("memory/host_slope_mib_per_step"), "MiB a step",
          "What stays above 0 is a leak."),
    Chart("rank_memory", "Peak of each rank", "memory", (ChartLine(None, prefix="memory/*/update_peak_gib"),), "GiB",
          "With several devices.", zero=True),
    Chart("memory_trouble", "Ran out and recovered", "memory",
          _lines("run/oom_recoveries=recoveries, so far", "run/alloc_retries=allocations repeated",
                 "run/skipped_updates=updates skipped", "run/rank_restarts=rank restarts, so far"), "times", "", zero=True),
)  # fmt: skip

ONLY_IN_ALL_METRICS: dict[str, str] = {
    "eval/stderr": "drawn as the whiskers of the score",
    "eval/prompts": "a constant, in the text of the first screen",
    "rollout/passed_over": "of the prompts' order, with a curriculum",
    "run/loss_scale": "a constant, unless a step of float16 was computed again",
    "publish/bytes": "a constant: those of the trained weights",
    "eval/failed": "a count that is 0 in a healthy run",
    "eval/not_applicable": "a constant of the data",
    "run/row_tokens": "follows from samples and lengths",
    "run/start": "drawn as a hairline at the first step of each start",
    "run/tokens_total": "an axis",
    "time/at": "an axis",
}
"""Metrics that no chart shows, by decision, and why."""


CHARTS = tuple(replace(chart, order=number) for number, chart in enumerate((*OVERVIEW, *LEARNING, *SPEED, *MEMORY)))


def charts_of(stage: str, page: Page | None = None) -> list[Chart]:
    """The charts of a stage (`rl`, `sft`, `reward_model`) in order, of one page or of all."""
    return [chart for chart in CHARTS if stage in chart.stages and page in (None, chart.page)]


def small_charts(stage: str, metrics: Iterable[str]) -> list[Chart]:
    """The six small charts of the first screen. With a reference its KL takes the place of the engine's distance, with a critic
    its explained variance that of the length."""
    known = set(metrics)
    left_out = {
        "logprob_gap" if "policy/kl_ref" in known else "kl_ref",
        "length" if "value/explained_variance" in known else "explained_variance",
    }
    found = [chart for chart in charts_of(stage, "overview") if chart.small and chart.id not in left_out]
    return found[:6]


def catalogue(metrics: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """All charts as JSON. `metrics`: those of the runs that are shown; lines with a prefix are then written out."""
    return [chart.as_json(metrics) for chart in CHARTS]


def chart_of(metric: str, stage: str) -> str | None:
    """The chart to jump to for a metric."""
    found = (chart.id for chart in charts_of(stage) if any(line.shows(metric) for line in chart.metrics))
    return next(found, None)
