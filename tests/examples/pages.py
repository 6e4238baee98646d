"""The pages of the documentation, and what a test looks for in them: code blocks, links, headings, names in backticks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of the languages."""
    return [text for language, text in FENCE.findall(page.read_text()) if language.strip() in languages]


@cache
def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of its links and pictures that lead to files of this repository, anchors included."""
    plain = re.sub(r"`[^`\n]*`", "", prose(page).replace("[`", "[").replace("`]", "]"))
    return [target for target in LINK.findall(plain) if not target.startswith(("http://", "https://", "mailto:"))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link to a part of a page may end with, as GitHub and the site make it from headings."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+?)\s*#*$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            found.append(target)
    return found


class _SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose extensions name Python functions; nothing is imported."""


_SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


@cache
def site() -> dict[str, Any]:
    """The settings of the site."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_SiteLoader)


def navigation(entry: Any = None) -> list[str]:
    """Every page that the site's navigation names."""
    entry = site()["nav"] if entry is None else entry
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [page for each in inner for page in navigation(each)]
