# SPDX-License-Identifier: Apache-2.0
"""The attacks of tests/attacks get the expected answers.

One process makes them all, each command in a child of its own, and streams how each went.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import attack
import pytest
from places import FOLDERS
from processes import started

SCRIPTS = sorted(path.stem for path in Path(attack.__file__).parent.glob("*.py"))
CASES = [
    (script, one.name)
    for script in SCRIPTS
    for one in getattr(importlib.import_module(script), "ATTACKS", ())
]
# They take seconds; each has a quick one of the same script beside it.
SLOW = {
    ("deep_folders", "1,500 folders on the disk, verify"),
    ("many_files", "files with other contents"),
}


@pytest.fixture(scope="module")
def answer_to(request, tmp_path_factory):
    """Return a function: of a case, how its attack went; only the cases to run are attacked."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    folder = tmp_path_factory.mktemp("attacks")
    code = f"import attack, pathlib; attack.work({cases!r}, pathlib.Path({str(folder)!r}))"
    path, found = os.pathsep.join([*FOLDERS, *sys.path]), {}
    with started([sys.executable, "-c", code], PYTHONPATH=path) as process:

        def answer(case):
            while case not in found:
                line = process.stdout.readline()
                assert line, f"the process has ended: {process.stderr.read()[-2000:]}"
                script, name, how = json.loads(line)
                found[script, name] = how
            return found[case]

        yield answer


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=" - ".join(case), marks=[pytest.mark.slow] * (case in SLOW))
        for case in CASES
    ],
)
def test_attack_gets_the_expected_answer(answer_to, case):
    how = answer_to(case)
    assert how["wrong"] == [], how


def test_attack_names_are_unique():
    assert len(set(CASES)) == len(CASES)
    assert set(CASES) >= SLOW
