# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints get an error, or load and step to finite weights; no process dies of one.

With PYTHONPATH=.:tests/support, `python tests/checkpoint/test_mutations.py 100000 [--first N]
[--workers N]` runs that many cases and counts what became of them; `--one N` runs one, and shows
where it goes wrong.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import FOLDERS

QUICK, SLOW = 90, 1500
SILENT_S = 60
"""A case that says nothing for so long hangs; those that take over 2 s of a processor are wrong."""


def run(first: int, count: int, silent_s: float = SILENT_S) -> list[tuple[int, str, str]]:
    """Run cases in a process, another one after each that dies; return (case, subject, outcome)."""
    found, number, end = [], first, first + count
    while number < end:
        found += _run_until_death(number, end, silent_s)
        number = found[-1][0] + 1
    return found


def _run_until_death(first: int, end: int, silent_s: float):
    code = f"import mutations; mutations.work(range({first}, {end}))"
    path = os.pathsep.join([*FOLDERS, *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    number, is_done = first, True
    try:
        while line := _line(process, silent_s):
            if line[0].isdigit():
                number, is_done = int(line), False
            else:
                is_done = True
                yield (number, *json.loads(line))
        silent = process.poll() is None and _is_silent(process)
    finally:
        process.kill()
        status = process.wait()
    if not is_done:
        yield number, "process", "hangs" if silent else f"dies with status {status}"
    elif number < end - 1:
        raise RuntimeError(f"the process of case {number} ended without a word, status {status}")


def _line(process, silent_s: float) -> str:
    """Return the next line, "" at the end and when none comes."""
    ready, _, _ = select.select([process.stdout], [], [], silent_s)
    return process.stdout.readline() if ready else ""


def _is_silent(process) -> bool:
    try:
        process.wait(timeout=1)
        return False
    except subprocess.TimeoutExpired:
        return True


def defects(found) -> list[str]:
    from mutations import GOOD

    return [f"case {n} ({subject}): {what}" for n, subject, what in found if what not in GOOD]


def check(count: int) -> None:
    found = run(0, count)
    assert len(found) == count
    assert defects(found) == []
    # Loads that never succeed would prove nothing, nor would ones that always do.
    for subject in {subject for _, subject, _ in found}:
        outcomes = Counter(what for _, name, what in found if name == subject)
        assert outcomes["loaded"] and len(outcomes) > 1, f"{subject}: {outcomes}"


def test_some_damaged_checkpoints_are_refused_or_load_and_step():
    check(QUICK)


@pytest.mark.slow
def test_many_damaged_checkpoints_are_refused_or_load_and_step():
    check(SLOW)


def test_harness_reports_a_process_that_dies_and_goes_on(monkeypatch, tmp_path):
    """Otherwise a crash would pass for silence."""
    fake = tmp_path / "mutations.py"
    fake.write_text(
        "import json, os\n"
        "def work(numbers):\n"
        "    for n in numbers:\n"
        "        print(n, flush=True)\n"
        "        os.abort() if n == 2 else None\n"
        "        print(json.dumps(['x', 'refused']), flush=True)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(f"{__name__}.FOLDERS", [str(tmp_path)])
    found = run(0, 5)
    assert [number for number, _, _ in found] == [0, 1, 2, 3, 4]
    assert found[2][2] == "dies with status -6"


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("count", type=int, nargs="?", default=SLOW)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--one", type=int)
    given = arguments.parse_args()
    if given.one is not None:
        import mutations

        mutations.show(given.one)
        return 0
    begin, share = time.time(), -(-given.count // given.workers)
    starts = range(given.first, given.first + given.count, share)
    ends = [min(start + share, given.first + given.count) for start in starts]
    with ThreadPoolExecutor(given.workers) as pool:
        parts = list(pool.map(run, starts, [e - s for s, e in zip(starts, ends, strict=True)]))
    found = [one for part in parts for one in part]
    wrong = defects(found)
    for line in wrong[:100]:
        print(line)
    bad = {line.split(" (")[0] for line in wrong}
    counts = Counter(
        (subject, "WRONG" if f"case {number}" in bad else what) for number, subject, what in found
    )
    for (subject, what), number in sorted(counts.items()):
        print(f"{subject:12} {what:18} {number}")
    print(f"{len(found)} cases, {len(wrong)} wrong, {time.time() - begin:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
