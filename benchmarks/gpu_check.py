# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command: `make gpu-check`.

Runs the parts in order, goes on after a failure, and writes a record after each of them.  Exit
status: 0 if all passed, 1 if any failed, 2 without a GPU, 3 if none failed but not all has run.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil

from benchmarks import gpu, record

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
RUNS = ROOT / "runs" / "gpu_check"

# Of all parts together; their own limits add up to more.
TOTAL_S = 1500
# A part that starts with less time left would be stopped before it shows anything.
LEAST_S = 10
# For what a command does on SIGTERM: torchrun ends its ranks.
GRACE_S = 10
LINES_SHOWN = 40
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
EXIT_STATUS = {PASSED: 0, FAILED: 1, NOT_RUN: 3}


@dataclass(frozen=True)
class Part:
    """A command of the check, which is stopped after `limit_s` seconds."""

    name: str
    command: list[str]
    limit_s: int


def parts(base: Path) -> list[Part]:
    """Return all parts; the files of the measurement go beside a record without suffix, `base`."""
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q"]
    sanitizer = [*tests, "tests/kernel/test_gpu_sanitizer.py", "-k"]
    build = [sys.executable, "-m", "examples.gpt.build", "configs/zero2_offload.json"]
    bench = [sys.executable, "-m", "benchmarks.step", "--device", "cuda"]
    return [
        Part("build", build, 240),
        Part("tests", [*tests, "tests/cuda", "tests/optimizer"], 180),
        Part("fsdp", [*tests, "tests/fsdp/test_fsdp_gpu.py"], 180),
        Part("zero", [*tests, "tests/zero/test_zero_gpu.py"], 300),
        Part("memcheck", [*sanitizer, "memcheck"], 90),
        Part("train", [*tests, "tests/train/test_train_gpu.py"], 240),
        Part("bench", [*bench, "--json", f"{base}_step.json"], 240),
        Part("racecheck", [*sanitizer, "racecheck"], 90),
        Part("initcheck", [*sanitizer, "initcheck"], 90),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="run these only; default: all")
    wanted = parser.parse_args(argv).parts
    if (absence := gpu.absence()) is not None:
        print(f"gpu-check: {absence}", file=sys.stderr)
        return 2
    # The command that runs is in a session of its own: it must not outlive this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, frame: sys.exit(128 + caught))
    machine = gpu.machine()
    base = record_base(RECORDS, machine["gpu"])
    chosen = {part.name: part for part in parts(base)}
    if unknown := sorted(set(wanted or ()) - set(chosen)):
        parser.error(f"got --parts {' '.join(unknown)}, expected some of {' '.join(chosen)}")
    return check([chosen[name] for name in chosen if name in (wanted or chosen)], base, machine)


def record_base(folder: Path, name: str) -> Path:
    """Return the path of a new record, without its suffix: `gpu_<name>_<yyyymm>`, numbered."""
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    first = folder / f"gpu_{words}_{date.today():%Y%m}"
    base, number = first, 1
    while base.with_suffix(".json").exists():
        number += 1
        base = first.with_name(f"{first.name}_run{number}")
    return base


def check(chosen: Sequence[Part], base: Path, machine: dict) -> int:
    """Run parts in order, write their record after each; return the exit status."""
    RUNS.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), []
    common = {
        "commit": record.commit(),
        "machine": machine,
        "cpu": record.cpu(),
        "versions": record.versions(),
    }
    for part in chosen:
        rows.append(row_of(part, TOTAL_S - (time.monotonic() - began)))
        statuses = [row["status"] for row in rows] + [NOT_RUN] * (len(chosen) - len(rows))
        status = next(s for s in (FAILED, NOT_RUN, PASSED) if s in statuses)
        result = {"status": status, "seconds": round(time.monotonic() - began, 1), **common}
        base.with_suffix(".json").write_text(json.dumps(result | {"parts": rows}, indent=1) + "\n")
    print(f"gpu-check on {machine['gpu']}: {status}, {result['seconds']:.0f} s")
    for row in rows:
        print(f"  {row['status']:8} {row['name']}, {row['seconds']:.0f} s  {row['reason']}")
    print("wrote", base.with_suffix(".json"))
    return EXIT_STATUS[status]


def row_of(part: Part, seconds_left: float) -> dict:
    """Run a part, print how it went, and return its row of the record."""
    log, limit_s = RUNS / f"{part.name}.log", round(min(part.limit_s, seconds_left))
    row = {"name": part.name, "command": part.command, "limit_s": limit_s, "seconds": 0.0}
    if limit_s < LEAST_S:
        return {**row, "status": NOT_RUN, "reason": f"no time left of {TOTAL_S} s"}
    print(f"== {part.name}: at most {limit_s} s, log: {log}", flush=True)
    began = time.monotonic()
    exit_status = run_limited(part.command, log, limit_s)
    output = log.read_text(errors="replace").splitlines()
    status, reason = verdict(exit_status, output)
    if status != PASSED:
        print(*output[-LINES_SHOWN:], sep="\n")
    print(f"== {part.name}: {status}: {reason}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    return {**row, "seconds": seconds, "status": status, "reason": reason}


def verdict(exit_status: int | None, output: list[str]) -> tuple[str, str]:
    """Return how a part went, and why; one whose tests are skipped has not run."""
    if exit_status is None:
        return FAILED, "stopped: out of time"
    closing = output[-1] if output else "no output"
    if exit_status:
        return FAILED, f"exit status {exit_status}: {closing}"
    return (NOT_RUN if re.search(r"\d+ skipped", closing) else PASSED), closing


def run_limited(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command in a session of its own and end all of it, whatever happens meanwhile.

    Args:
        command: its words.
        log: file for what the command prints.
        limit_s: seconds after which it is stopped.

    Returns:
        The exit status, None if it was stopped.
    """
    with log.open("wb") as output:
        process = psutil.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    except psutil.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    family = []
    with suppress(psutil.NoSuchProcess):
        # torchrun's ranks are in sessions of their own: no signal to the group reaches them.
        family = process.children(recursive=True)
        process.terminate()
        psutil.wait_procs([process], timeout=GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
