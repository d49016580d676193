# SPDX-License-Identifier: Apache-2.0
"""What measurements in several processes share: their options, and what results say of the run."""

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.fidelity.pool import cores, cpu_seconds
from benchmarks.usage import check_least
from zero8.op import kernel


def add_arguments(parser: argparse.ArgumentParser, steps: int, quick: str) -> None:
    """Add the options of a measurement to a parser.

    Args:
        parser: of the command.
        steps: the default number of steps.
        quick: the help of `--quick`.
    """
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps of every run")
    parser.add_argument("--workers", type=int, default=cores(), help="processes, one thread each")


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError unless the numbers are large enough."""
    for name, least in (("steps", 2), ("workers", 1)):
        check_least(f"--{name}", getattr(arguments, name), least)


def command(package: str, arguments: argparse.Namespace, steps: int) -> str:
    """Return the command that repeats a measurement, whose default is so many steps."""
    flags = ["--quick"] * arguments.quick + ["--json", str(arguments.json)]
    flags += ["--steps", str(arguments.steps)] * (arguments.steps != steps)
    return shlex.join(["python", "-m", package, *flags])


def _no_figures(result: dict, out: Path) -> list[Path]:
    return []


def main(
    package: str,
    doc: str | None,
    measure: Callable[[int], dict],
    markdown: Callable[[dict], str],
    argv: Sequence[str] | None,
    draw: Callable[[dict, Path], list[Path]] = _no_figures,
) -> int:
    """Run the command of a measurement whose one option is its file; return the exit status.

    Args:
        package: of the command.
        doc: its description.
        measure: returns the result, all but the time and the command, by the number of workers.
        markdown: returns the tables of a result.
        argv: the arguments.
        draw: writes figures of a result beside the file; returns their paths.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    out = parser.parse_args(argv).json
    began = time.perf_counter()
    result = measure(cores())
    result |= spent(began, shlex.join(["python", "-m", package, "--json", str(out)]))
    print("wrote", *record.write(result, out, markdown), *draw(result, out))
    return 0


def environment(workers: int, steps: int | None = None) -> dict:
    """Prepare a measurement, and return what its result says of the place where it runs.

    Args:
        workers: number of processes.
        steps: of every run; None if there are several numbers of them.
    """
    kernel.module()  # compiled here, rather than by two workers at a time
    return {
        "versions": record.versions(),
        "commit": record.commit(),  # now: the checkout may move on before the last job has ended
        "cpu": record.cpu(),
        "workers": workers,
        **({} if steps is None else {"steps": steps}),
    }


def spent(began: float, command: str) -> dict:
    """Return what the result says of the run, which `time.perf_counter` saw begin."""
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds(), "command": command}


def title_lines(result: dict, title: str, where: str) -> list[str]:
    """Return the head of a record: its title, and what was run where.

    The title has the number of steps if it is the same for all runs.
    """
    steps = f", {result['steps']} steps" if "steps" in result else ""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"# {title}{steps}",
        "",
        f"`{result['command']}`, {result['seconds']:.0f} s (CPU: {result['cpu_seconds']:.0f} s), "
        f"commit {result['commit'] or 'unknown'}, {where}; {versions}.",
        "",
    ]


def section_lines(
    result: dict, title: str, sections: Sequence[Callable[[dict], list[str]]]
) -> list[str]:
    """Return the head of a record of some workers, and its sections, with an empty line after each.

    Args:
        result: the result.
        title: of the record.
        sections: return the lines of a section.
    """
    lines = title_lines(result, title, f"on {result['workers']} cores of {result['cpu']}")
    for section in sections:
        lines += [*section(result), ""]
    return lines
