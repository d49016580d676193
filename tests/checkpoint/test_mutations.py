# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints get an error, or load and step to finite weights; no process dies of one."""

import os
import sys

import pytest
from places import FOLDERS, SUPPORT
from processes import run


@pytest.mark.parametrize("count", [90, pytest.param(1500, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_or_load_and_step(count):
    """`make fuzz` has more cases."""
    paths = os.pathsep.join([*FOLDERS, *sys.path])
    command = [sys.executable, str(SUPPORT / "mutations.py"), str(count)]
    done = run(command, seconds=60 + 3 * count, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
