# SPDX-License-Identifier: Apache-2.0
"""The API reference has every public name, and the site loads nothing from the network."""

import re
import sys
from importlib.util import find_spec

import needs
import processes
import pytest
from places import ROOT

import zero8

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
NO_MKDOCS = "no mkdocs: pip install 'zero8[docs]'"
# What a browser loads by itself: not the links of a page.
LOADED = re.compile(r"""<(?:script|img|iframe)[^>]* src="?https?:|<link[^>]* href="?https?:""")
LOADED_BY_CSS = re.compile(r"""(?:url\(|@import )["']?https?:""")


def test_reference_has_every_public_name():
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = {name for page in pages for name in DIRECTIVE.findall(page.read_text())}
    assert {f"zero8.{name}" for name in zero8.__all__ if name != "__version__"} <= shown


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does."""
    needs.need(None if find_spec("mkdocs") else NO_MKDOCS)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = processes.run([*command, "--config-file", str(ROOT / "mkdocs.yml")], seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_loads_nothing_from_the_network(site):
    pages, sheets = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 20 and len(sheets) > 2
    assert [page for page in pages if LOADED.search(page.read_text())] == []
    assert [sheet for sheet in sheets if LOADED_BY_CSS.search(sheet.read_text())] == []


def test_signature_of_an_optimizer_shows_values(site):
    text = re.sub("<[^>]+>", "", (site / "docs" / "api" / "optimizer.html").read_text())
    assert "betas: tuple[float, float] = (0.9, 0.999)," in text
