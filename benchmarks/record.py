# SPDX-License-Identifier: Apache-2.0
"""The common parts of all records of measurements: the environment, and writing them."""

import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import zero8

PACKAGES = ("torch", "deepspeed", "torchao", "bitsandbytes", "flashoptim")


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
    import cpuinfo  # of zero8[bench]

    return cpuinfo.get_cpu_info().get("brand_raw", platform.processor())


def machine() -> dict:
    """Describe the machine besides its processor; to be called before the measurement loads it."""
    return {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "openmp": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_", "KMP_"))},
    }


def commit() -> str | None:
    """Return the git commit of this checkout, None outside of one."""
    root = Path(zero8.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or another user's checkout
        return None
    return done.stdout.strip()


def write(
    result: dict,
    out: Path,
    markdown: Callable[[dict], str],
    plot: Callable[[dict, Path], None] | None = None,
) -> tuple[Path, ...]:
    """Write a result as JSON to `out`, its table and any figure beside it; return the paths."""
    table, figure = out.with_suffix(".md"), out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    table.write_text(markdown(result))
    if plot is None:
        return out, table
    plot(result, figure)
    return out, table, figure


def print_checks(checks: list[dict]) -> None:
    """Print a line per target."""
    for check in checks:
        verdict = "met" if check["met"] else "MISSED"
        print(f"{verdict:6}  {check['target']}: {check['value']:.4g} (limit {check['limit']:.4g})")


def print_skipped(skipped: list[dict]) -> None:
    """Print a line for each skipped measurement."""
    for entry in skipped:
        print(f"skipped {entry['name']}: {entry['reason']}")


def skipped_lines(skipped: list[dict]) -> list[str]:
    """Return the lines of a markdown section on skipped measurements, if there are any."""
    lines = [f"- {entry['name']}: {entry['reason']}" for entry in skipped]
    return ["", "## Skipped", "", *lines] if lines else []


def table_lines(headers: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a markdown table."""
    rule = ["---"] + ["---:"] * (len(headers) - 1)  # names to the left, numbers to the right
    return ["| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows)]


def check_lines(checks: list[dict]) -> list[str]:
    """Return the lines of a markdown table of targets."""
    cells = [
        [
            c["target"].replace("|", "\\|"),
            f"{c['value']:.4g}",
            f"{c['limit']:.4g}",
            "yes" if c["met"] else "**no**",
        ]
        for c in checks
    ]
    return table_lines(["target", "value", "limit", "met"], cells)
