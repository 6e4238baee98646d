"""The learning curve is really drawn, from any metrics a run can leave."""

import sys

import numpy as np
import pytest

from trimtab.base.errors import ConfigError, DataError
from trimtab.config.schema import Observe
from trimtab.observe.curve import binned, plot_curve, reward_parts, small_panels, smooth, title
from trimtab.record.columns import MetricTable
from trimtab.record.sinks import Sinks


def write_run(run_dir, rows):
    sinks = Sinks(run_dir, Observe(tensorboard=False), None)
    for step, metrics in rows:
        sinks.write(step, metrics)
    sinks.close()


def training_rows(steps, scale=1.0):
    yield 0, {"eval/pass@1": 0.2}
    for step in range(1, steps + 1):
        times = {"time/rollout": 2.0, "time/update": 1.0, "time/score": 0.0, "time/idle": 0.1, "time/total": 3.1}
        yield step, {"reward/mean": scale * step / steps, "response/length_mean": 100.0 + step} | times
    yield steps, {"eval/pass@1": 0.6}


def draw(run_dir):
    """The picture as an array of (height, width, channel)."""
    from matplotlib.image import imread

    out = run_dir / "pictures" / "curve.png"
    plot_curve(run_dir, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    return imread(out)


def has_color(picture, rgb):
    return bool((np.abs(picture[..., :3] - np.array(rgb) / 255).max(axis=-1) < 0.02).sum() > 50)


BLUE, ORANGE, GREEN, GREY = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73), (0xD0, 0xD0, 0xD0)


@pytest.mark.parametrize("scale", [1.0, 20.0])  # 20: rewards not comparable with accuracy get an axis of their own
def test_every_series_is_in_the_picture(tmp_path, scale):
    write_run(tmp_path, training_rows(300, scale))
    picture = draw(tmp_path)
    assert picture.shape[0] > 800
    assert picture.shape[1] > 800
    assert all(has_color(picture, color) for color in (BLUE, ORANGE, GREEN, GREY))


@pytest.mark.parametrize(
    "rows",
    [
        [(1, {"reward/mean": 0.5, "response/length_mean": 3.0, "time/rollout": 1.0})],
        [(0, {"eval/pass@1": 0.5})],
        [(1, {"policy/loss": 1.0}), (2, {"reward/mean": float("nan"), "time/rollout": 0.0})],
    ],
)
def test_short_and_sparse_runs_are_drawn(tmp_path, rows):
    write_run(tmp_path, rows)
    assert draw(tmp_path).std() > 0


def test_a_run_without_metrics_says_so(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl has no metrics yet"):
        plot_curve(tmp_path, tmp_path / "curve.png")


def test_matplotlib_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"trimtab\[plot\]"):
        plot_curve(tmp_path, tmp_path / "curve.png")


def test_smoothing_keeps_constants_and_centres():
    assert smooth(np.full(50, 0.3)) == pytest.approx(np.full(50, 0.3))
    assert smooth(np.array([0.0, 3.0, 6.0])) == pytest.approx([1.5, 3.0, 4.5])
    assert smooth(np.array([2.0])) == pytest.approx([2.0])


def test_bins_hold_means():
    edges = np.array([0.5, 2.5, 4.5, 6.5])
    points = (np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0]))
    assert binned(edges, points).tolist() == [2.0, 5.0, 0.0]


def test_the_title_skips_what_is_missing():
    rows = [{"step": 0, "eval/pass@1": 0.25}, {"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": 0.5}]
    assert title("run-1", MetricTable(rows)) == "run-1: reward 0.500, eval pass@1 25.0%"
    later = MetricTable([*rows, {"step": 9, "eval/pass@1": 0.75}])
    assert title("run-1", later).endswith("eval pass@1 25.0% → 75.0%")
    assert title("run-1", MetricTable()) == "run-1"


def test_rows_without_a_usable_step_are_left_out_of_the_picture(tmp_path):
    write_run(tmp_path, training_rows(30))
    whole = draw(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in ("", '"step": "seven", ', '"step": null, ', '"step": 1e400, ', '"step": [1], ', '"step": -3, '):
            file.write("{" + step + '"reward/mean": 7.0}\n')
    assert (draw(tmp_path) == whole).all()


def test_a_run_shows_all_that_its_reward_depends_on():
    row = {"step": 1, "reward/mean": 0.5, "reward/std": 0.1, "reward/right": 1.0, "reward/short": 0.0}
    row |= {"reward/right/wait_s": 1.0, "reward/zero_std_groups": 0.25, "response/truncated": 0.5}
    row |= {"policy/entropy": 0.4, "policy/kl_ref": 0.01, "policy/kl_old": 0.0}
    shown = {
        label: {name: points[1].tolist() for name, points in lines.items()}
        for label, lines in small_panels(MetricTable([row])).items()
    }
    assert shown == {
        "share": {"responses cut off": [0.5], "groups with signal": [0.75]},
        "entropy\n(nats a token)": {"": [0.4]},
        "KL (nats a token)": {"to the reference": [0.01]},
        "reward parts": {"right": [1.0], "short": [0.0]},
    }
    assert reward_parts(MetricTable([{"step": 1, "reward/mean": 1.0, "reward/right": 1.0}])) == [], (
        "one part alone is the reward"
    )


@pytest.mark.parametrize("loss", ["sft/loss", "rm/loss"])
def test_runs_on_given_data_have_a_curve_of_their_loss(tmp_path, loss):
    rows = [(0, {"eval/loss": 2.0})]
    rows += [(step, {loss: 2.0 / step, "policy/grad_norm": 1.0, "time/update": 1.0}) for step in range(1, 40)]
    write_run(tmp_path, rows)
    picture = draw(tmp_path)
    assert has_color(picture, BLUE) and has_color(picture, ORANGE)
    assert title("r", MetricTable({"step": s, **m} for s, m in rows)) == "r: loss 2.000 → 0.051, eval loss 2.000"


def test_the_title_has_the_first_and_the_last_values_and_no_means():
    """As the summary and the doctor do."""
    rows = [{"step": step, "reward/mean": 0.375 if step == 1 else 0.0} for step in range(1, 50)]
    assert title("r", MetricTable(rows)) == "r: reward 0.375 → 0.000"
