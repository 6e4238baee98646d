"""The documentation holds together: links and anchors lead somewhere, commands and files exist, every page can be found."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from tests.examples.pages import PAGES, ROOT, anchors, blocks, broken, links, navigation, page_id, prose, site
from trimtab.cli import app
from trimtab.config.reference import STAGES, slot, use_schema

SOURCE = ROOT / "src" / "trimtab"
ROOMS = sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")
HISTORY = ("docs/log.md", "docs/changes.md", "CHANGELOG.md")
"""Pages that speak of files as they were."""
PATH = re.compile(rf"`((?:{'|'.join(ROOMS)}|tests|bench|examples|docs|constraints)/(?:[\w./-]*\.\w+|(?:[\w.-]+/)*))`")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The title\n[a](page.md#the-title) [b](#the-title) [c](#gone) [d](gone.md) [`e`](page.md#gone)\n"
        "```\n[f](g)\n```\n"
    )
    assert (anchors(page), len(links(page))) == ({"the-title"}, 5)
    assert broken(page) == ["#gone", "gone.md", "page.md#gone"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_parses(page: Path) -> None:
    for code in blocks(page, "python", "py"):
        ast.parse(code)


def commands(page: Path) -> list[str]:
    """Every `trimtab ...` of a page, in code blocks and in sentences, without comments."""
    lines = "\n".join(blocks(page, "", "bash", "sh", "shell", "console")).replace("\\\n", " ").splitlines()
    written = [line.strip().removeprefix("$ ") for line in lines]
    written += re.findall(r"`(trimtab [^`\n]*)`", prose(page))
    return [re.sub(r"\s#\s.*", "", line) for line in written if line.startswith("trimtab ")]


def problems(line: str) -> list[str]:
    """What in a command line does not exist: the command, an option, a key."""
    _, name, *words = shlex.split(line.replace("'", '"') if line.count("'") % 2 else line)
    if name.startswith("-"):
        return []
    if name not in COMMANDS:
        return [f"there is no command {name!r}"]
    options = {option for each in COMMANDS[name].params for option in each.opts}
    words = words[: words.index("--")] if "--" in words else words
    found = [f"{name} has no option {word}" for word in words if re.match(r"--[a-z]", word) and word not in options]
    keys = [word.partition("=")[0] for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    return found + [f"there is no key {key}" for key in keys if not exists(key)]


def exists(key: str) -> bool:
    for schema in STAGES.values():
        with use_schema(schema):
            if slot(key.split(".")):
                return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist(page: Path) -> None:
    assert [problem for line in commands(page) for problem in problems(line)] == []


def test_a_wrong_command_is_found() -> None:
    assert problems("trimtab train a.yaml --resume learn.lr=1e-6") == []
    assert problems("trimtab train a.yaml --resum learn.rl=1e-6") == [
        "train has no option --resum",
        "there is no key learn.rl",
    ]
    assert problems("trimtab trian a.yaml") == ["there is no command 'trian'"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = prose(page) + "\n".join(f"`{line}`" for block in blocks(page, "") for line in block.splitlines())
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("page", [page for page in PAGES if page_id(page) not in HISTORY], ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    named = PATH.findall(prose(page))
    places = (ROOT, SOURCE, page.parent)
    real = [path for path in named if "NAME" not in path]
    assert [path for path in real if not any((place / path.rstrip("/")).exists() for place in places)] == []


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(page_id(page) for page in PAGES)
    assert all((ROOT / page).is_file() for page in navigation())


def test_the_site_searches_and_refuses_what_is_broken() -> None:
    assert "search" in site()["plugins"]
    assert set(site()["validation"]["links"].values()) == {"warn"}


def test_the_architecture_is_short_and_drawn() -> None:
    page = ROOT / "docs" / "architecture.md"
    assert len(page.read_text().splitlines()) < 150
    assert len(blocks(page, "mermaid")) == 4


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_diagrams_have_no_semicolon(page: Path) -> None:
    """It ends a statement in Mermaid: a sentence with one is a syntax error, which only a browser would show."""
    assert [block for block in blocks(page, "mermaid") if ";" in block] == []


def test_moved_modules_are_where_the_page_of_changes_says() -> None:
    rows = re.findall(
        r"^\| `(trimtab\.[\w.*]+)` \| `(trimtab\.[\w.*]+)` \|$", prose(ROOT / "docs" / "changes.md"), re.MULTILINE
    )
    assert len(rows) > 30

    def is_there(module: str) -> bool:
        path = SOURCE.parent / module.removesuffix(".*").replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

    assert [now for _, now in rows if not is_there(now)] == []
    assert [before for before, _ in rows if is_there(before)] == []


def test_the_extras_of_the_readme_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = prose(ROOT / "README.md").partition("| extra |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)
    assert len(named) > 5
    assert set(named) <= set(extras)


def test_every_example_is_listed() -> None:
    there = [path for path in (ROOT / "examples").rglob("*.*") if path.suffix in (".yaml", ".py", ".sh")]
    listed = set(links(ROOT / "examples" / "README.md"))
    assert [path.name for path in there if path.relative_to(ROOT / "examples").as_posix() not in listed] == []


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs trimtab[docs]")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    assert (tmp_path / "site" / "CONTRIBUTING" / "index.html").exists()
    assert "CONTRIBUTING" in (tmp_path / "site" / "search" / "search_index.json").read_text()
