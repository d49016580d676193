# SPDX-License-Identifier: Apache-2.0
"""Everything that has to be run on a GPU, in one command: `python -m zero8.bench.gpu_check`.

Runs the parts in order, goes on after a failure, and writes a record after each of them.  Exit
status: 0 if all passed, 1 if any failed, 2 without a GPU, 3 if nothing failed but not all has run.
"""

import argparse
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from zero8 import extras
from zero8.bench import gpu, record
from zero8.bench.gpu_check import parts as gpu_check_parts
from zero8.bench.gpu_check.parts import FAILED, NOT_RUN, PASSED, ROOT, Part
from zero8.bench.gpu_check.run import run_limited

RECORDS = ROOT / "zero8" / "bench" / "records"
RUNS = ROOT / "runs" / "gpu_check"

# Of all parts together; their own limits add up to more.
TOTAL_SECONDS = 1500
# What starts with less time left would be stopped before it tells anything.
LEAST_SECONDS = 10
EXIT_STATUS = {PASSED: 0, FAILED: 1, NOT_RUN: 3}
LINES_SHOWN = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m zero8.bench.gpu_check", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the results")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of logs and training runs")
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="PART",
        help="run these only, where one command must not take so long; default: all",
    )
    arguments = parser.parse_args(argv)
    if (absence := gpu.absence()) is not None:
        print(f"gpu-check: {absence}", file=sys.stderr)
        return 2
    extras.need("cpuinfo", "matplotlib", "psutil")
    # The command that runs is in a session of its own: it must not outlive this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, frame: sys.exit(128 + caught))
    machine = gpu.machine()
    base = record_base(arguments.records, machine["gpu"])
    parts = gpu_check_parts.parts(arguments.runs, base)
    if wanted := arguments.parts:
        names = [part.name for part in parts]
        if unknown := sorted(set(wanted) - set(names)):
            parser.error(f"got --parts {' '.join(unknown)}, expected some of {' '.join(names)}")
        parts = [part for part in parts if part.name in wanted]
    return check(parts, arguments.runs, base, machine)


def record_base(folder: Path, name: str) -> Path:
    """Return the path of a new record, without its suffix: `gpu_<name>_<yyyymm>`, numbered."""
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    base = folder / f"gpu_{words}_{date.today():%Y%m}"
    number = 1
    while base.with_suffix(".json").exists():
        number += 1
        base = base.with_name(f"{base.name.partition('_run')[0]}_run{number}")
    return base


def check(parts: Sequence[Part], runs: Path, base: Path, machine: dict) -> int:
    """Run parts in order, write their record after each; return the exit status."""
    runs.mkdir(parents=True, exist_ok=True)
    base.parent.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), []
    common = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": record.commit(),
        "machine": machine,
        "cpu": record.cpu(),
        "versions": record.versions(),
    }
    for part in parts:
        rows.append(row_of(part, runs, TOTAL_SECONDS - (time.monotonic() - began)))
        result = {
            "status": overall([row["status"] for row in rows], len(parts)),
            "seconds": round(time.monotonic() - began, 1),
            **common,
            "parts": rows,
        }
        base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"gpu-check on {machine['gpu']}: {result['status']}, {result['seconds']:.0f} s")
    for row in rows:
        print(
            f"  {row['status']:8} {row['name']}, {row['seconds']:.0f} s  {row['reason']}".rstrip()
        )
    print("wrote", base.with_suffix(".json"))
    return EXIT_STATUS[result["status"]]


def overall(statuses: Sequence[str], count: int) -> str:
    """Return the status of `count` parts, of which these have one so far."""
    if FAILED in statuses:
        return FAILED
    return NOT_RUN if NOT_RUN in statuses or len(statuses) < count else PASSED


def row_of(part: Part, runs: Path, seconds_left: float) -> dict:
    """Run a part, say how it went, and return its row of the record."""
    log = runs / f"{part.name}.log"
    limit_s = round(min(part.limit_s, seconds_left))
    row = {"name": part.name, "command": part.text, "limit_s": limit_s, "seconds": 0.0}
    if part.missing or limit_s < LEAST_SECONDS:
        reason = part.missing or f"no time left of {TOTAL_SECONDS} s"
        print(f"== {part.name}: {NOT_RUN}: {reason}", flush=True)
        return {**row, "status": NOT_RUN, "reason": reason, "result": {}}
    print(f"== {part.name}: {part.text} (at most {limit_s} s, log: {log})", flush=True)
    done = run_limited(part.command, part.environment, log, limit_s, ROOT)
    output = log.read_text(errors="replace")
    if done.status is None:
        verdict = gpu_check_parts.Verdict(FAILED, f"stopped after {limit_s} s")
    else:
        verdict = part.judge(done.status, output)
    if verdict.status != PASSED:
        print(*output.splitlines()[-LINES_SHOWN:], sep="\n")
    print(f"== {part.name}: {verdict.status} in {done.seconds:.0f} s {verdict.reason}", flush=True)
    return {**row, "seconds": round(done.seconds, 1), **verdict._asdict()}
