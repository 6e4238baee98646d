"""`trimtab export`: the model, and beside it a card. Whatever uploads it does so afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.base.errors import ConfigError, Problem
from trimtab.observe.model_card import write_card
from trimtab.run.export import export_run, find_checkpoint
from trimtab.run.hub import OPTION, check_name

EXPORTS = "export"
"""Folder in a run for what is uploaded without a folder of its own."""


@dataclass(frozen=True)
class Exported:
    checkpoint: Path
    folder: Path
    card: Path | None


def export_with_card(
    run: Path, to: Path | None, which: str, dtype: str, card: bool, hub: str | None, public: bool = False
) -> Exported:
    """Without `to`, what goes to the Hub is in RUN/export; an upload that failed is repeated with what is there."""
    if hub is not None:
        check_name(hub)
    elif public:
        raise ConfigError([Problem("--public", "has no effect without --to-hub", f"Add {OPTION} USER/NAME.")])
    if to is None and hub is None:
        raise ConfigError(
            [Problem("FOLDER", "is missing", f"Write trimtab export {run} FOLDER, or {OPTION} USER/NAME.")]
        )
    if to is None:
        source = find_checkpoint(run, which)
        folder = run / EXPORTS / (source.name if dtype == "same" else f"{source.name}-{dtype}")
        if not (folder / "config.json").is_file():
            export_run(run, folder, which, dtype)
    else:
        source, folder = export_run(run, to, which, dtype), to
    if not card and hub is None:
        return Exported(source, folder, None)
    step = int(source.name.removeprefix("step-"))
    return Exported(source, folder, write_card(run, folder, step, hub))
