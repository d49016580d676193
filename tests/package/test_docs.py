# SPDX-License-Identifier: Apache-2.0
"""The files, links and tests that the docs name exist."""

import re

import pytest
from places import ROOT

FOLDERS = ("benchmarks", "configs", "launch", "tests")
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
DOCS += [ROOT / name / "README.md" for name in FOLDERS]
DOCS += sorted((ROOT / "docs").glob("*.md"))
PATH = re.compile(r"`((?:zero8|csrc|tests|configs|launch|benchmarks|examples)/[\w./*]+)`")
TEST = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
NAMED_TEST = re.compile(r"`(?:[\w/]+/)?(test_\w+(?:\.py)?)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_name_files_that_exist(doc):
    text = doc.read_text()
    missing = [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in LINK.findall(text) if not (doc.parent / name).exists()]
    assert missing == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_name_tests_that_exist(doc):
    sources = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.name for path in sources}
    known |= {name for path in sources for name in TEST.findall(path.read_text())}
    assert [name for name in NAMED_TEST.findall(doc.read_text()) if name not in known] == []
