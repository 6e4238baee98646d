"""The house: a room imports only from the rooms above it, and no files import each other in a circle.

All imports count: at the top of a file, in a function, and those for type checkers.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import trimtab

ROOT = Path(trimtab.__file__).parent
ROOMS = (
    "base",
    "config",
    "data",
    "model",
    "workers",
    "rollout",
    "reward",
    "learn",
    "plan",
    "record",
    "update",
    "cluster",
    "observe",
    "run",
    "convert",
    "api",
    "demo",
    "cli",
)
"""From the top of the house to the bottom (docs/architecture.md)."""
FRONT_DOOR = ("trimtab", "trimtab.__main__")
"""`import trimtab` and `python -m trimtab` show what is below: they may import from every room."""


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """The modules of this package that a file imports, wherever in the file it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                found.add(f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source)
    return {module for module in found if module in known and module != name}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, path, set(known)) for name, path in known.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_file_is_in_a_room() -> None:
    assert {room(name) for name in modules() if name not in FRONT_DOOR} <= set(ROOMS)


def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, found in graph().items()
        if name not in FRONT_DOOR
        for imported in sorted(found)
        if imported in FRONT_DOOR or ROOMS.index(room(imported)) > ROOMS.index(room(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    found = {name: above - set(FRONT_DOOR) for name, above in graph().items()}
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_imports_are_found_wherever_they_are(tmp_path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport trimtab.base.errors\nif TYPE_CHECKING:\n    from trimtab.plan import job\n"
        "def f():\n    from trimtab.config.run import Run\n    from .near import here\n    import torch\n"
    )
    known = {"trimtab.base.errors", "trimtab.plan", "trimtab.plan.job", "trimtab.config.run", "trimtab.data.near"}
    assert imports("trimtab.data.file", file, known) == known - {"trimtab.plan"}


def test_files_and_functions_stay_short() -> None:
    """A file of one idea has at most 500 lines, a function at most 80."""
    long = []
    for name, path in modules().items():
        text = path.read_text()
        if len(text.splitlines()) > 500:
            long.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
                long.append(f"{name}.{node.name}")
    assert not long


def test_no_two_classes_have_one_name() -> None:
    """Or a reader has to know which is meant."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    assert not {name: where for name, where in found.items() if len(where) > 1}
