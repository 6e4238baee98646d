"""A plan needs no torch: neither when its modules are loaded nor later, when a function imports something."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trimtab.plan

FOLDER = Path(trimtab.plan.__file__).parent
LOADED = "import sys; assert not {'torch', 'transformers'} & sys.modules.keys(), sorted(sys.modules)"


def _imports() -> Iterator[str]:
    """All import statements of the room, wherever they stand."""
    for file in sorted(FOLDER.glob("*.py")):
        yield f"import trimtab.plan.{file.stem}"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield ast.unparse(node)


def test_planning_loads_no_torch() -> None:
    code = "\n".join(dict.fromkeys(_imports()))
    code = "\n".join(
        ["from __future__ import annotations", *(line for line in code.splitlines() if "__future__" not in line)]
    )
    found = subprocess.run([sys.executable, "-c", f"{code}\n{LOADED}"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
