# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of the docs for newcomers run, and CITATION.cff is of this version."""

import re

import pytest
from places import ROOT

from zero8 import __version__

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


def test_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == __version__
