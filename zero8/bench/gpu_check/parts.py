# SPDX-License-Identifier: Apache-2.0
"""What `gpu_check` runs, and when a part of it has passed."""

import json
import math
import os
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import zero8

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
ROOT = Path(zero8.__file__).parents[1]

OFFLOAD = "configs/zero2_offload.json"
ON_GPU = "configs/zero2_bf16.json"
STEPS = 200
# Between the validation losses of the two optimizers; other seeds are 0.6 % apart.
LOSS_GAP = 0.02

# Of tests: the part's name, what it runs, and its seconds.
TESTS = (
    ("tests", "tests/cuda", 180),
    ("fsdp", "tests/fsdp/test_fsdp_gpu.py", 180),
    ("zero", "tests/zero/test_zero_gpu.py", 300),
)
SANITIZER_ERRORS = 97
# In a process of its own, in memory of which each tensor has an allocation to itself.
SMALL_CASE = """\
import torch
from zero8.bench.step import kernel as step_kernel
from zero8.spec.codec import CODECS
from zero8.op import cuda
for block_size in (256, 512, 4096):  # teams of a warp, of two, and of sixteen
    step_kernel.BLOCK_SIZE = block_size
    step_kernel.check_on(torch.device("cuda"), cuda.step, CODECS, [step_kernel.CHECK_SHAPE])
"""


class Verdict(NamedTuple):
    """How a part went: one of the three words, why, and what it measured."""

    status: str
    reason: str = ""
    result: dict = {}


@dataclass(frozen=True)
class Part:
    """A command of the check.

    Attributes:
        name: of the part and of its log.
        command: its words.
        limit_s: seconds after which it is stopped.
        judge: from exit status and output to a verdict.
        environment: variables besides those of this process.
        missing: why it cannot run here, if it cannot.
    """

    name: str
    command: list[str]
    limit_s: int
    judge: Callable[[int, str], Verdict]
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""

    @property
    def text(self) -> str:
        """The command as typed into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def parts(runs: Path, base: Path) -> list[Part]:
    """Return all parts.

    Args:
        runs: folder for what they leave behind.
        base: path of the record without its suffix; the measurement's files go beside it.
    """
    python, bench = sys.executable, Path(f"{base}_step.json")
    step = [python, "-m", "zero8.cli", "bench", "step", "--device", "cuda", "--json", str(bench)]
    return [
        Part("build", [python, "-m", "zero8.train.build", OFFLOAD], 240, judge_status),
        *(_tests(*which, runs) for which in TESTS),
        _sanitizer("memcheck", 90),
        _training("train_offload", OFFLOAD, runs),
        _training("train_on_gpu", ON_GPU, runs),
        Part("bench", step, 240, partial(judge_bench, bench)),
        _sanitizer("racecheck", 90),
        _sanitizer("initcheck", 90),
    ]


def judge_status(status: int, output: str) -> Verdict:
    """Judge by the exit status alone."""
    return Verdict(PASSED) if status == 0 else Verdict(FAILED, f"exit status {status}")


# --- Tests ---------------------------------------------------------------------------------------


def _tests(name: str, path: str, limit_s: int, runs: Path) -> Part:
    report = runs / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", path, "-m", "gpu", "-q", f"--junitxml={report}"]
    return Part(name, command, limit_s, partial(judge_tests, report))


def judge_tests(report: Path, status: int, output: str) -> Verdict:
    """Judge tests by pytest's JUnit report: some have run, and none has failed or was skipped."""
    if not report.is_file():
        return Verdict(FAILED, f"exit status {status}, without a report")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    report.unlink()  # the next run's must not be this one's
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    bad = counts["failures"] + counts["errors"] + counts["skipped"]
    passed = status == 0 and counts["tests"] > 0 and bad == 0
    return Verdict(PASSED if passed else FAILED, text, counts)


# --- Training ------------------------------------------------------------------------------------


def _training(name: str, config: str, runs: Path) -> Part:
    out = runs / name
    environment = {
        "STEPS": str(STEPS),
        "CONFIG": config,
        "OUT": str(out),
        "PYTHON": sys.executable,
    }
    judge = partial(judge_training, out / "summary.json")
    return Part(name, ["bash", "launch/local.sh"], 120, judge, environment)


def judge_training(path: Path, status: int, output: str) -> Verdict:
    """Judge both runs of launch/local.sh: on the GPU, and with losses that are near."""
    if status != 0 or not path.is_file():
        return Verdict(FAILED, f"exit status {status}")
    summary = json.loads(path.read_text())
    path.unlink()
    fp32, quantized = summary["runs"]
    gap = quantized["val_loss"] / fp32["val_loss"] - 1
    text = f"on {summary['device']}, validation losses {gap:+.2%} apart"
    near = math.isfinite(gap) and abs(gap) <= LOSS_GAP
    passed = summary["device"] == "cuda" and near
    return Verdict(PASSED if passed else FAILED, text, {"val_loss_gap": gap, **summary})


# --- The measurement -----------------------------------------------------------------------------


def judge_bench(path: Path, status: int, output: str) -> Verdict:
    """Judge the measurement: it has run, and its targets are met."""
    if not path.is_file():
        return Verdict(FAILED, f"exit status {status}")
    result = json.loads(path.read_text())
    missed = [check["target"] for check in result["checks"] if not check["met"]]
    text = f"{len(missed)} of {len(result['checks'])} targets missed" if missed else ""
    if status != 0:
        text = f"exit status {status}"
    found = {"file": path.name, "missed": missed, "skipped": result["skipped"]}
    return Verdict(FAILED if missed or status else PASSED, text, found)


# --- compute-sanitizer ---------------------------------------------------------------------------


def _sanitizer(tool: str, limit_s: int) -> Part:
    path = sanitizer()
    words = [path or "compute-sanitizer", "--tool", tool]
    words += ["--report-api-errors", "no"]  # torch's start calls what may fail
    if tool != "initcheck":  # which has to see that torch's kernels write
        words += ["--kernel-name", "kernel_substring=zero8_step"]
    words += ["--error-exitcode", str(SANITIZER_ERRORS), sys.executable, "-c", SMALL_CASE]
    missing = "" if path else "compute-sanitizer is neither in CUDA_HOME nor on PATH"
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(tool, words, limit_s, judge_sanitizer, environment, missing)


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, of CUDA_HOME, PATH or CUDA's usual folder, or None."""
    home = os.environ.get("CUDA_HOME")
    folders = [os.path.join(home, "bin")] if home else []
    folders += [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def judge_sanitizer(status: int, output: str) -> Verdict:
    """Judge a tool of compute-sanitizer by its summary; one that refuses the GPU has not run."""
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    refused = [line for line in lines if "not supported" in line or "Unable to" in line]
    summary = [line for line in lines if "SUMMARY" in line]
    if status == 0 and summary and not refused:
        return Verdict(PASSED, summary[-1])
    if refused and status != SANITIZER_ERRORS:
        return Verdict(NOT_RUN, f"compute-sanitizer: {refused[0]}")
    return Verdict(FAILED, f"exit status {status}, {(summary or ['without a summary'])[-1]}")
