"""Completion lengths of an earlier run, for `trimtab plan --like RUN`."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from trimtab.base.errors import ConfigError, Problem
from trimtab.plan.scenario import QUANTILES, between
from trimtab.record.layout import METRICS_FILE
from trimtab.record.reader import RunReader

LENGTHS = ("response/length_p50", "response/length_p90", "response/length_max")
RECENT_STEPS = 20


def lengths_of(run: Path, most: int) -> tuple[float, ...]:
    """Completion lengths at evenly spaced quantiles, from the last steps of a run: straight lines between the median, nine tenths
    and the longest."""
    if not (run / METRICS_FILE).is_file():
        raise ConfigError([Problem("--like", f"{run} has no {METRICS_FILE}", "Give the folder of a run.")])
    reader = RunReader(run)
    reader.update()
    seen = [reader.metrics.points(name)[1][-RECENT_STEPS:].tolist() for name in LENGTHS]
    if not all(seen):
        raise ConfigError(
            [Problem("--like", f"no step of {run} has {', '.join(LENGTHS)}", "Give a run of this version.")]
        )
    half, nine_tenths, longest = (min(float(most), median(values)) for values in seen)
    points = [(0.0, max(1.0, 2 * half - nine_tenths)), (0.5, half), (0.9, nine_tenths), (1.0, longest)]
    return tuple(between(points, (i + 0.5) / QUANTILES) for i in range(QUANTILES))
