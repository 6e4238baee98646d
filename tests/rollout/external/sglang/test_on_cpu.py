"""The interpreter that tests SGLang on a CPU changes SGLang's process, and nothing of Trimtab does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).with_name("on_cpu") / "python"
SETTINGS = """
class ServerArgs:
    sampling_backend = "its own"
    def _handle_cpu_backends(self):
        self.seen = True
"""
CODE = """
import torch
from sglang.srt.server_args import ServerArgs
settings = ServerArgs()
settings._handle_cpu_backends()
print(settings.sampling_backend, settings.seen, torch.zeros(2, pin_memory=True).pin_memory().tolist())
"""


def test_settings_of_sglang_are_changed_once_they_are_imported(tmp_path: Path) -> None:
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package / "server_args.py").write_text(SETTINGS)
    there = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [PYTHON, "-c", CODE],
        env={**os.environ, "TRIMTAB_SGLANG_PYTHON": sys.executable, "PYTHONPATH": there},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["trimtab", "True", "[0.0,", "0.0]"], done.stderr
