# SPDX-License-Identifier: Apache-2.0
"""What all records of measurements share: what was run where, tables, and small figures."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from io import BytesIO
from pathlib import Path

import cpuinfo
from matplotlib.figure import Figure
from PIL import Image

import zero8

PACKAGES = ("torch", "deepspeed", "torchao", "bitsandbytes", "flashoptim")
NUM_COLORS = 64
TEXT, NUMBER = "{}", "{:.4g}"
"""Formats of columns of a table."""


def versions() -> dict[str, str]:
    """Return the versions of Python, zero8 and of the packages that are installed."""
    found = {"python": platform.python_version(), "zero8": zero8.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def cpu() -> str:
    """Return the name of the processor."""
    return cpuinfo.get_cpu_info().get("brand_raw", platform.processor())


def commit() -> str | None:
    """Return the git commit of this checkout, None outside of one."""
    root = Path(zero8.__file__).parents[1]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or another user's checkout
        return None
    return done.stdout.strip()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that has the option `--json` of all measurements."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(f"python -m {module}", description=doc, formatter_class=raw)
    made.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    return made


def names_of(valid: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option whose value is comma-separated names."""

    def names(words: str) -> tuple[str, ...]:
        found = tuple(words.split(","))
        if unknown := [name for name in found if name not in valid]:
            message = f"got {unknown[0]!r}, expected one of {list(valid)}"
            raise argparse.ArgumentTypeError(message)
        return found

    return names


def environment(module: str) -> dict:
    """Return what was run where; to be called before the run, as a checkout may move on."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit(),
        "cpu": cpu(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "versions": versions(),
        "began": time.time(),
    }


def write(result: dict, out: Path, markdown: Callable[[dict], list[str]], title: str) -> None:
    """Write a result as JSON to `out` and its tables beside it; print their paths.

    The result has the entries of `environment`; `markdown` returns the lines below the head.
    """
    result["seconds"] = round(time.time() - result.pop("began"))
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = [
        f"# {title}",
        "",
        f"`{result['command']}`, {result['seconds']} s, commit {result['commit'] or 'unknown'}, "
        f"on {result['cores']} cores of {result['cpu']}, load average before "
        f"{result['load_average']:.2f}; {packages}.",
        "",
    ]
    table = out.with_suffix(".md")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    table.write_text("\n".join([*head, *markdown(result)]) + "\n")
    print("wrote", out, table)


def table_of(rows: Iterable[dict], columns: dict[str, tuple[str, str]]) -> list[str]:
    """Return the lines of a markdown table; a column has a key of the rows and a format."""
    rule = ["---" if form == TEXT else "---:" for _, form in columns.values()]
    cells = [[_cell(row.get(key), form) for key, form in columns.values()] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in (columns, rule, *cells)]


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


def write_png(figure: Figure, path: Path) -> None:
    """Save a figure with a palette of its most frequent colors: a third of the bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    Image.open(buffer).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    print("wrote", path)
