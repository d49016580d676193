# SPDX-License-Identifier: Apache-2.0
"""The files and links that the docs name exist."""

import re

import pytest
from places import ROOT

DOCS = [ROOT / "README.md", ROOT / "configs" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"`((?:zero8|csrc|tests|configs|launch)/[\w./*]+)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)\)")


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_name_files_that_exist(doc):
    text = doc.read_text()
    missing = [name for name in PATH.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in LINK.findall(text) if not (doc.parent / name).exists()]
    assert missing == []


def test_docs_name_files_at_all():
    """Guards the test above: the architecture names files of every room."""
    named = set(PATH.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert {"csrc/update.h", "zero8/op/launch.py", "zero8/zero/moment_tensor.py"} <= named
    assert len(named) > 30
