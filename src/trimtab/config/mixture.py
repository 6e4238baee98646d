"""Settings of mixtures that contradict each other (check.py has those of the other sections)."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import Contradiction, clash
from trimtab.config.learn import Learn
from trimtab.config.schema import Config


def routes(config: Config, learn: Learn) -> Iterator[Contradiction]:
    if not learn.router_replay:
        return
    if config.run.engine != "native":
        yield clash(
            "learn.router_replay run.engine",
            f"needs an engine that says which experts it chose, and run.engine is {config.run.engine}",
            "Write run.engine: native, or learn.router_replay: false",
        )
    if config.environment is not None:
        yield clash(
            "learn.router_replay environment",
            "keeps what the engine chose for one completion, and with an environment a sample is drawn in several",
            "Write learn.router_replay: false",
        )
