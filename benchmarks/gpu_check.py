# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command: `make gpu-check`.

Runs the parts in order, goes on after a failure, and writes a record after each of them.  Exit
status: 0 if all passed, 1 if any failed, 2 without a GPU, 3 if none failed but not all has run.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from benchmarks import record

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
RUNS = ROOT / "runs" / "gpu_check"

MODULE = "benchmarks.gpu_check"
LINES_SHOWN = 40
OUT_OF_TIME = 124
"""The exit status of timeout(1)."""
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
    build = [sys.executable, "-m", "examples.gpt", "--build", "--optimizer"]
    bench = [sys.executable, "-m", "benchmarks.step", "--device", "cuda"]
    return [
        Part("build", [*build, "Adam8bitBlockwise"], 240),
        Part("build_adamw", [*build, "AdamW"], 240),
        Part("tests", [*tests, "tests/cuda", "tests/optimizer"], 180),
        Part("fsdp", [*tests, "tests/fsdp"], 180),
        Part("zero", [*tests, "tests/zero"], 300),
        Part("memcheck", [*sanitizer, "memcheck"], 90),
        Part("train", [*tests, "tests/train/test_train_gpu.py"], 240),
        Part("bench", [*bench, "--json", f"{base}_step.json"], 240),
        Part("racecheck", [*sanitizer, "racecheck"], 90),
        Part("initcheck", [*sanitizer, "initcheck"], 90),
    ]


def record_base(folder: Path, name: str) -> Path:
    """Return the path of a new record, without its suffix: `gpu_<name>_<yyyymm>`, numbered."""
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    first = f"gpu_{words}_{date.today():%Y%m}"
    number = 1 + len(list(folder.glob(f"{first}*.json")))
    return folder / (first if number == 1 else f"{first}_run{number}")


def check(chosen: Sequence[Part], base: Path, gpu: str) -> int:
    """Run parts in order, write their record after each; return the exit status."""
    RUNS.mkdir(parents=True, exist_ok=True)
    rows = []
    common = {"gpu": gpu, "cuda": torch.version.cuda, **record.environment(MODULE)}
    for part in chosen:
        rows.append(row_of(part))
        statuses = [row["status"] for row in rows] + [NOT_RUN] * (len(chosen) - len(rows))
        status = next(s for s in (FAILED, NOT_RUN, PASSED) if s in statuses)
        result = {"status": status, **common, "parts": rows}
        base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"gpu-check on {gpu}: {status}")
    print("wrote", base.with_suffix(".json"))
    return EXIT_STATUS[status]


def row_of(part: Part) -> dict:
    """Run a part, print how it went, and return its row of the record."""
    log = RUNS / f"{part.name}.log"
    print(f"== {part.name}: at most {part.limit_s} s, log: {log}", flush=True)
    began = time.monotonic()
    with log.open("wb") as file:
        # On SIGTERM torchrun ends its ranks, which are in sessions of their own.
        command = ["timeout", "--kill-after=10", str(part.limit_s), *part.command]
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    output = log.read_text(errors="replace").splitlines()
    status, reason = verdict(done.returncode, output)
    if status != PASSED:
        print(*output[-LINES_SHOWN:], sep="\n")
    print(f"== {part.name}: {status}: {reason}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    row = {"name": part.name, "command": part.command, "limit_s": part.limit_s}
    return {**row, "seconds": seconds, "status": status, "reason": reason}


def verdict(exit_status: int, output: list[str]) -> tuple[str, str]:
    """Return how a part went, and why; one whose tests are skipped has not run."""
    if exit_status == OUT_OF_TIME:
        return FAILED, "stopped: out of time"
    closing = output[-1] if output else "no output"
    if exit_status:
        return FAILED, f"exit status {exit_status}: {closing}"
    return (NOT_RUN if re.search(r"\d+ skipped", closing) else PASSED), closing


def main() -> int:
    """Run the parts that are asked for and return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="run these only; default: all")
    wanted = parser.parse_args().parts
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        print(f"gpu-check: torch {torch.__version__} (CUDA: {built}) finds no GPU", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    base = record_base(RECORDS, gpu)
    chosen = {part.name: part for part in parts(base)}
    if unknown := sorted(set(wanted or ()) - set(chosen)):
        parser.error(f"got --parts {' '.join(unknown)}, expected some of {' '.join(chosen)}")
    return check([chosen[name] for name in chosen if name in (wanted or chosen)], base, gpu)


if __name__ == "__main__":
    sys.exit(main())
