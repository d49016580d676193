# SPDX-License-Identifier: Apache-2.0
"""The commands `zero8 checkpoint ...`: they need no GPU, no engine and no model."""

import argparse

from zero8.checkpoint.commands import convert, diff, inspect, prune, seal, verify

COMMANDS = (
    ("verify", verify, "check that a checkpoint is whole: exit status 0, or 1 if it is damaged"),
    ("inspect", inspect, "show the contents of a checkpoint, and how its codes are used"),
    (
        "diff",
        diff,
        "list parameters that differ in two checkpoints: exit status 0 for none, else 1",
    ),
    ("convert", convert, "convert a checkpoint of one framework for another, keeping 8-bit codes"),
    ("seal", seal, "write a manifest for a folder, for verify to compare it with"),
    ("prune", prune, "delete the oldest tags of a folder, never the last complete one"),
)
TROUBLE = 2
"""Exit status of a command that failed, as of wrong usage."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `zero8 checkpoint`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module, help_text in COMMANDS:
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        module.add_arguments(command)
        command.set_defaults(run_checkpoint=module.run)


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text of a command."""
    try:
        return arguments.run_checkpoint(arguments)
    except (ValueError, OSError) as error:
        return TROUBLE, {"error": str(error)}, f"zero8 checkpoint: {error}"
    except (MemoryError, RecursionError) as error:
        text = f"{type(error).__name__}: the checkpoint needs more memory or stack than available"
        return TROUBLE, {"error": text}, f"zero8 checkpoint: {text}"
