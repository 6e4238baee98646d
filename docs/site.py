"""The site has the repository's layout: README, CONTRIBUTING, bench/ and examples/ are pages beside docs/.

So a relative link means the same on GitHub, on disk and on the site. MkDocs calls these functions (mkdocs.yml names this file).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

PUBLISHED = ("*.md", "LICENSE", "docs/*.md", "docs/*.css", "bench/*.md", "bench/results/*", "examples/**/*.*")

SEARCH_BOOST = {"CONTRIBUTING.md": 4.0, "docs/convert.md": 0.5, "bench/README.md": 0.3, "docs/log.md": 0.05}
"""Where things are is found before where they are mentioned; long tables, measurements and the log come last."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files of docs/ by their names in the repository, the other pages beside them, and the theme's own files."""
    root = Path(config.config_file_path).parent
    published = [path for pattern in PUBLISHED for path in sorted(root.glob(pattern))]
    own = [
        File(path.relative_to(root).as_posix(), str(root), config.site_dir, config.use_directory_urls)
        for path in published
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return Files([*own, *(file for file in files if file.src_dir != config.docs_dir)])


def on_page_markdown(markdown: str, page: Page, **_: object) -> None:
    """The order of search results. In the page itself these settings would be shown by GitHub."""
    if page.file.src_uri in SEARCH_BOOST:
        page.meta["search"] = {"boost": SEARCH_BOOST[page.file.src_uri]}
