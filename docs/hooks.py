# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages of the site have the paths that they have in the repository.

So links between pages, in docs/ and outside of it, are the same on the site as in a checkout.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OTHERS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/records/demo_cpu_202611.png",
    "benchmarks/records/demo_lion_cpu_202611.png",
    "benchmarks/records/low_bit_202611_updates.png",
    "configs/README.md",
    *(
        f"docs/pictures/{name}_{theme}.png"
        for name in ("block", "codes", "passes")
        for theme in ("dark", "light")
    ),
    "docs/site.css",
    "launch/README.md",
    "tests/README.md",
)
"""What the site has besides the pages of docs/."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take each file from its place in the repository; those of the theme stay."""
    pages = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    names = sorted([*OTHERS, *pages])
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [File(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in names]
    return Files([*of_theme, *ours])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show a path in place of a link to what is in the repository, but not on the site.

    No address of the repository is known that such a link could have instead.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(folder, link[1]))
        is_left_out = (ROOT / name).exists() and name not in files.src_uris
        return f"`{name}`" if is_left_out else link[0]

    return LINK.sub(shown, markdown)
