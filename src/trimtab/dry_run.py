"""Everything short of the run: config, data and rewards are read and tried, the resolved config is printed."""

from __future__ import annotations

from typing import IO, Any

from trimtab.config.algorithms import resolve
from trimtab.config.load import resolved_yaml
from trimtab.config.schema import Config
from trimtab.reward.scorer import Scorer
from trimtab.session import Inputs, read_work


def dry_run(config: Config, inputs: Inputs, file: IO[str]) -> dict[str, Any]:
    """Find whatever would stop the run before its first step, without loading weights or making a run folder."""
    work = read_work(config, inputs)
    scorer = Scorer(config.reward, workers=1, base_dir=inputs.base_dir, functions=inputs.rewards)
    try:
        scorer.check(work.train[0].keys() - {config.data.prompt})
    finally:
        scorer.close()
    config = config.model_copy(update={"learn": resolve(config.learn)})
    print(resolved_yaml(config), file=file)
    result = {
        "ok": True,
        "train_rows": len(work.train),
        "eval_prompts": len(work.eval),
        "longest_prompt_tokens": work.longest_prompt,
        "sequences_per_step": config.learn.sequences_per_step,
        "max_new_tokens_per_step": config.learn.sequences_per_step * config.learn.max_new_tokens,
    }
    print("\n".join(f"{key}: {value}" for key, value in result.items()), file=file)
    return result
