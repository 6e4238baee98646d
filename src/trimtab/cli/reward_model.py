"""`trimtab reward-model CONFIG [key=value ...]`"""

from __future__ import annotations

from trimtab.cli.offline import stage_command

reward_model = stage_command("reward-model", "Train a reward model on pairs of a better and a worse answer.")
