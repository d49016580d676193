# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the docs for newcomers run, and CITATION.cff names a release."""

import re

import pytest
from places import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
NAMES = ("from-bitsandbytes.md", "faq.md")
BLOCKS = [
    pytest.param(block, id=f"{name} {number}")
    for name in NAMES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_of_the_docs_runs(block, capsys):
    exec(block, {})
    printed = capsys.readouterr().out
    assert ("print" in block) == bool(printed)


def test_python_blocks_are_found():
    assert len(BLOCKS) == 3


def test_citation_names_the_newest_release():
    text = (ROOT / "CITATION.cff").read_text()
    cited = re.findall(r"^(?:version|date-released): (.*)$", text, re.MULTILINE)
    releases = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", CHANGELOG, re.MULTILINE)
    assert tuple(cited) == releases[0]
