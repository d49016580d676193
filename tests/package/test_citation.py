# SPDX-License-Identifier: Apache-2.0
"""CITATION.cff names a release."""

import re

from places import ROOT


def test_citation_names_the_newest_release():
    text = (ROOT / "CITATION.cff").read_text()
    cited = re.findall(r"^(?:version|date-released): (.*)$", text, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert tuple(cited) == releases[0]
