"""What a rank has of the micro-batches that several ranks share (`run.sequence_parallel`), and the least that its budgets can be.

Tokens are divided evenly. All of a rank's may be learned ones, for completions lie together. Its pieces see what comes before
them: with gathered keys the first piece of each of its two stretches may see a whole sequence; where heads are exchanged, a part
of the heads sees everything. Both are counted as what takes more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from trimtab.plan.activations import MicroBatchSize
from trimtab.plan.job import Job


class RowRanks(NamedTuple):
    """How many ranks share each micro-batch, by the model that passes over it."""

    policy: int = 1
    reference: int = 1
    critic: int = 1

    @property
    def most(self) -> int:
        return max(self)

    def trained(self, job: Job) -> int:
        """The fewest, of models that are trained."""
        return min(self.policy, self.critic) if job.critic is not None else self.policy

    def scoring(self, job: Job) -> int:
        """The fewest, of models that score."""
        found = [self.policy] if job.old_logprobs else []
        found += [self.reference] if job.compared else []
        found += [self.critic] if job.critic is not None else []
        return min(found, default=self.policy)


WHOLE_ROWS = RowRanks()
"""Nobody shares micro-batches."""


def least_budget(job: Job, rows: RowRanks) -> int:
    """Tokens of the longest sequence on a device."""
    return -(-job.longest_trained // rows.trained(job))


def least_score_budget(job: Job, rows: RowRanks) -> int:
    return -(-job.longest_trained // rows.scoring(job))


def row_here(job: Job, budget: int, sharing: int, devices: int) -> MicroBatchSize:
    """What a rank has of the largest micro-batch, which so many ranks share. `budget`: tokens on a device."""
    whole = job.row(min(budget * sharing, most_tokens(job, devices // sharing)))
    if sharing == 1:
        return whole
    tokens = -(-whole.tokens // sharing)
    longest = job.typical_prompt + job.completion
    deep = longest * (2 if whole.tokens > longest else 1)
    part = whole.times(1 / sharing)
    return replace(
        part,
        predicted=min(whole.predicted, tokens),
        seen=min(part.seen + deep, whole.seen),
        segments=min(part.segments + 2, whole.segments),
        row=whole.tokens,
    )


def most_tokens(job: Job, sets: int) -> int:
    """Most tokens of a micro-batch, however large its budget: a share of the step, and a sequence by which one may have more than
    others. `sets`: of ranks that share micro-batches."""
    share = -(-job.step_row.tokens // sets) + (job.longest_trained if sets > 1 else 0)
    return max(job.longest_trained, min(job.step_row.tokens, share))
