# SPDX-License-Identifier: Apache-2.0
"""The files and links that the docs name exist, and the API reference has every public name."""

import re

import pytest
from places import ROOT

import zero8

FOLDERS = ("benchmarks", "configs", "launch", "tests")
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCS += [ROOT / name / "README.md" for name in FOLDERS]
DOCS += sorted((ROOT / "docs").glob("*.md"))
PATH = re.compile(r"`((?:zero8|csrc|tests|configs|launch|benchmarks|examples)/[\w./*]+)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_name_files_that_exist(doc):
    text = doc.read_text()
    missing = [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in LINK.findall(text) if not (doc.parent / name).exists()]
    assert missing == []


def test_reference_has_every_public_name():
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = re.findall(r"^::: (\S+)$", "".join(p.read_text() for p in pages), re.MULTILINE)
    assert {f"zero8.{name}" for name in zero8.__all__ if name != "__version__"} <= set(shown)
