"""Everything short of the run: config, data and rewards are read and tried, the resolved config and the plan are printed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import IO, Any

from trimtab.config.load import resolved_yaml
from trimtab.config.schema import Config
from trimtab.model.load import declared_stops
from trimtab.run.inputs import Inputs
from trimtab.run.plan_ahead import plan_lines
from trimtab.run.session import check


def dry_run(config: Config, inputs: Inputs, file: IO[str], *, resume: bool = False) -> dict[str, Any]:
    """Find what would stop the run before its first step, without loading weights or making a run folder."""
    with ExitStack() as stack:
        ready = check(config, inputs, stack, resume=resume)
        facts, lines = plan_lines(ready)
    learn, work = ready.config.learn, ready.work
    print(resolved_yaml(ready.config), file=file)
    for note in (work.train.note, work.eval.note):
        if note:
            print(note, file=file)
    result = {
        "ok": True,
        "run_dir": str(ready.folder),
        "train_rows": len(work.train.rows),
        "eval_prompts": len(work.eval.prompts),
        "longest_prompt_tokens": work.train.typical,
        "sequences_per_step": learn.sequences_per_step,
        "max_new_tokens_per_step": learn.sequences_per_step * learn.max_new_tokens,
    }
    print("\n".join(f"{key}: {value}" for key, value in result.items()), file=file)
    print("\n".join(lines), file=file)
    prompt = work.view(ready.config, declared_stops(ready.config.model, work.tokenizer))
    prompt.print(file)
    return result | facts | prompt.facts()
