"""Names of tasks in metrics: few, safe, each for one task. Importable without torch; the doctor reads them back."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_TASKS = 32
"""Names in metrics. Where there are more tasks, all but the first 31 are reported together as `other`."""
OTHER = "other"
MAX_NAME_CHARACTERS = 40


def metric_names(tasks: Sequence[str]) -> dict[str, str]:
    """By task, the ones that matter most first: what is in front does not depend on what follows."""
    own = tasks if len(tasks) <= MAX_TASKS else tasks[: MAX_TASKS - 1]
    names: dict[str, str] = {}
    taken = {OTHER}
    for task in own:
        safe = name = re.sub(r"[^A-Za-z0-9_.-]+", "_", task)[:MAX_NAME_CHARACTERS] or "_"
        number = 1
        while name in taken:
            number += 1
            name = f"{safe}_{number}"
        taken.add(name)
        names[task] = name
    return names
