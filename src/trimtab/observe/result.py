"""What training returns, and any run folder, for Python and notebooks: numbers, samples, findings, a report, and a picture of it.

    result = trimtab.train(...)          # a dict, as the command line prints with --json
    result                               # in a notebook: the verdict, curves, and where a step goes
    result.metrics()["reward/mean"]      # a numpy array, one value a step

    run = trimtab.Run("runs/demo")       # the same for any folder, also of a run that goes on

Reads files only and imports no torch.
"""

from __future__ import annotations

import io
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trimtab.base.errors import ConfigError, DataError, Problem
from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.record import refuse_what_cannot_be_judged
from trimtab.observe.doctor.report import print_report, run_report, verdict_report
from trimtab.observe.look import RunLook, look_at
from trimtab.observe.run_html import run_html
from trimtab.observe.verdict import judge
from trimtab.observe.watch.source import RunSource
from trimtab.record.reader import open_run


class Diagnosis(list[Finding]):
    """What the doctor found, the worst first; printed, it is what `trimtab doctor` prints."""

    def __init__(self, look: RunLook) -> None:
        super().__init__(look.done.findings)
        parts = [(part.id, part.text, part.key, part.gain, part.level) for part in judge(look).parts]
        out = io.StringIO()
        print_report(out, [verdict_report(parts), *run_report(look.folder, look.record, look.done)])
        self._text = out.getvalue().rstrip()

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__


class RunFolder:
    """A run folder. `trimtab.Run` is this class."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        """Raises a DataError where the folder holds no run."""
        self.folder = Path(folder)
        self._source: RunSource | None = None
        open_run(self.folder, "trimtab.Run")

    def metrics(self) -> dict[str, NDArray[Any]]:
        """An array for each metric, all of one length, and `step`; NaN where a step has no value.

        `pandas.DataFrame(run.metrics())` makes a table of it."""
        found = open_run(self.folder, "trimtab.Run").metrics
        columns: dict[str, NDArray[Any]] = {"step": found.steps}
        return columns | {name: np.asarray(found.column(name)) for name in found.names}

    def sample_steps(self, kind: Literal["train", "eval"] = "train") -> list[int]:
        """Steps of which samples were kept."""
        place = self.folder / "samples" if kind == "train" else self.folder / "eval" / "samples"
        names = (path.stem.removeprefix("step-") for path in place.glob("step-*.jsonl"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def samples(self, step: int | None = None, kind: Literal["train", "eval"] = "train") -> list[dict[str, Any]]:
        """Completions with their rewards that were kept of a step; without one, of the last that has some.

        `kind`: of training, or of the evaluation after that step."""
        if kind not in ("train", "eval"):
            raise ConfigError([Problem("kind", f"got {kind!r}", "Write 'train' or 'eval'.")])
        steps = self.sample_steps(kind)
        if step is None:
            if not steps:
                return []
            step = steps[-1]
        if step not in steps:
            there = f"There are some of {_listed(steps)}" if steps else "There are none"
            raise DataError(f"{self.folder} has no samples of step {step}. {there}; see observe.samples_every")
        reader = open_run(self.folder, "trimtab.Run")
        return reader.samples(step) if kind == "train" else reader.eval_samples(step)

    def doctor(self) -> Diagnosis:
        """What is wrong with the run and what to change, the worst first; empty where nothing is."""
        look = look_at(self.folder, "trimtab.Run")
        refuse_what_cannot_be_judged(look.reader, look.record)
        return Diagnosis(look)

    def report(self, path: str | PathLike[str] | None = None) -> Path:
        """Write the run as one HTML file that needs no network; without a path, RUN/report.html. Returns where it is."""
        from trimtab.observe.web.report import write_report

        return write_report([self.folder], None if path is None else Path(path)).path

    def _repr_html_(self) -> str:
        """Read anew each time: the run may go on."""
        if self._source is None:
            self._source = RunSource(self.folder)
        else:
            self._source.refresh()
        return run_html(self._source.view)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


class Result(dict[str, Any]):
    """The summary of a run that has ended, and what can be read of it."""

    @property
    def run(self) -> RunFolder:
        return RunFolder(self["run_dir"])

    def metrics(self) -> dict[str, NDArray[Any]]:
        """See RunFolder."""
        return self.run.metrics()

    def samples(self, step: int | None = None, kind: Literal["train", "eval"] = "train") -> list[dict[str, Any]]:
        """See RunFolder."""
        return self.run.samples(step, kind)

    def doctor(self) -> Diagnosis:
        """See RunFolder."""
        return self.run.doctor()

    def report(self, path: str | PathLike[str] | None = None) -> Path:
        """See RunFolder."""
        return self.run.report(path)

    def _repr_html_(self) -> str | None:
        """None, so that the dictionary is shown, where the folder is gone."""
        try:
            return self.run._repr_html_()
        except DataError:
            return None


def _listed(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown) if len(shown) <= 8 else f"{', '.join(shown[:4])}, …, {', '.join(shown[-3:])}"
