"""`trimtab sft CONFIG [key=value ...]`"""

from __future__ import annotations

from trimtab.cli.offline import stage_command

sft = stage_command("sft", "Train a model on example answers (supervised fine-tuning).")
