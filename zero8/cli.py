# SPDX-License-Identifier: Apache-2.0
"""The command line: `zero8 doctor`, `plan`, `checkpoint` and `bench`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import zero8
from zero8.environment import packages

ABOUT = "Tools for optimizers with 8-bit states."
FIRST = "Begin with zero8 doctor, and zero8 plan --parameters 8B."


COMMANDS = {
    "doctor": ("zero8.doctor", "say whether everything works here, and if not, why"),
    "plan": ("zero8.plan.command", "estimate memory and time of a run"),
    "checkpoint": (
        "zero8.checkpoint.commands.command",
        "verify, inspect, compare, convert and delete checkpoints",
    ),
    "bench": ("zero8.bench", "time a step here, beside DeepSpeed's and torch's"),
}
"""The module that adds a command's arguments, its function as `run` among them, and its use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser(words).parse_args(words)
    with packages.explained(arguments.program):
        return _run(arguments)


class _Command(argparse.ArgumentParser):
    """A parser that prints the help for a command without its subcommand."""

    def parse_known_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None):
        """Parse as the base class does."""
        if not args and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(packages.FAILED)
        self.set_defaults(program=self.prog)
        return super().parse_known_args(args, namespace)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line; only the module of its command is imported."""
    parser = _Command(prog="zero8", description=ABOUT, epilog=FIRST)
    parser.add_argument("--version", action="version", version=f"zero8 {zero8.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text)
        if words and words[0] == name:
            with packages.explained(command.prog):
                found = import_module(module)
            command.description = found.__doc__
            found.add_arguments(command)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Run a command that returns its status, a JSON object and a text; print one of the two."""
    # DeepSpeed logs to stdout as soon as it is imported; our stdout must have only the result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            status, result, text = arguments.run(arguments)
        except (ValueError, OSError, MemoryError, RecursionError) as error:
            problem = str(error)
            if isinstance(error, MemoryError | RecursionError):
                problem = f"{type(error).__name__}: this needs more memory or stack than there is"
            status, result = packages.FAILED, {"error": problem}
            text = f"{arguments.program}: {problem}"
    _print(json.dumps(result, indent=2) if arguments.json else text)
    return status


def _print(text: str) -> None:
    """Print; ignores a closed pipe, such as head(1)'s."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes again at exit, which would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
