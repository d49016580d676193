# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints get an error, or load and step to finite weights; no process dies of one.

`make fuzz` runs more cases; with `--one N` this file shows where one goes wrong.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from mutations import GOOD, outcome
from places import FOLDERS

QUICK, SLOW = 90, 1500
START_S, CASE_S = 60, 3
"""A case takes `mutations.MAX_SECONDS` at most: a process that takes longer hangs."""


def run(first: int, end: int) -> list:
    """Run cases in a process, another one after each that dies; return [case, subject, outcome]."""
    found = []
    while first < end:
        command = f"import mutations; mutations.work(range({first}, {end}))"
        paths = {"PYTHONPATH": os.pathsep.join([*FOLDERS, *sys.path]), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", command],
                env=os.environ | paths,
                capture_output=True,
                timeout=START_S + CASE_S * (end - first),
            )
            printed, how = done.stdout, f"dies with status {done.returncode}: {done.stderr[-500:]}"
        except subprocess.TimeoutExpired as late:
            printed, how = late.stdout or b"", "hangs"
        lines = [json.loads(line) for line in printed.splitlines()]
        assert lines, how
        found += [line for line in lines if len(line) == 3]
        number, *ended = lines[-1]
        if not ended:
            found.append([number, "process", how])
        first = number + 1
    return found


def defects(found: list) -> list[str]:
    return [f"case {n} ({subject}): {what}" for n, subject, what in found if what not in GOOD]


@pytest.mark.parametrize("count", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_or_load_and_step(count):
    found = run(0, count)
    assert [number for number, *_ in found] == list(range(count))
    assert defects(found) == []
    # Loads that never succeed would prove nothing, nor would ones that always do.
    for subject in {subject for _, subject, _ in found}:
        outcomes = Counter(what for _, name, what in found if name == subject)
        assert outcomes["loaded"] and len(outcomes) > 1, f"{subject}: {outcomes}"


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("count", type=int, nargs="?", default=SLOW)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--one", type=int)
    given = arguments.parse_args()
    if given.one is not None:
        print(outcome(given.one, is_raised=True))
        return 0
    half = given.first + given.count // 2
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (given.first, half), (half, given.first + given.count))
    found = [*first, *second]
    wrong = defects(found)
    print(*wrong[:100], sep="\n")
    counts = Counter((subject, what) for _, subject, what in found if what in GOOD)
    for (subject, what), number in sorted(counts.items()):
        print(f"{subject:12} {what:18} {number}")
    print(f"{len(found)} cases, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
