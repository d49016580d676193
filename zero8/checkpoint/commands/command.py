# SPDX-License-Identifier: Apache-2.0
"""Tools for checkpoints; none needs a GPU or a model."""

import argparse
from pathlib import Path

from zero8.checkpoint.commands import convert, diff, inspect, verify
from zero8.files import tags

HELP = {
    "verify": "check that a checkpoint is whole: exit status 0, or 1 if it is damaged",
    "inspect": "show the contents of a checkpoint, and how its codes are used",
    "diff": "list parameters that differ in two checkpoints: exit status 0 for none, else 1",
    "convert": "convert a checkpoint of one framework for another, keeping 8-bit codes",
    "seal": "write a manifest for a folder, so that verify can check its files",
    "prune": "delete the oldest tags of a folder, never the last complete one",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, run) in {
        "verify": (verify.add_arguments, verify.run),
        "inspect": (inspect.add_arguments, inspect.run),
        "diff": (diff.add_arguments, diff.run),
        "convert": (convert.add_arguments, convert.run),
        "seal": (_add_arguments_of_seal, _seal),
        "prune": (_add_arguments_of_prune, _prune),
    }.items():
        command = commands.add_parser(name, help=HELP[name], description=HELP[name])
        command.add_argument("--json", action="store_true", help="print one JSON object")
        add(command)
        command.set_defaults(run=run)


def _add_arguments_of_seal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="DIR", help="a folder that is completely written"
    )
    parser.add_argument("--force", action="store_true", help="even if its save was interrupted")


def _seal(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    path = _folder(arguments.path)
    manifest = tags.seal(path, force=arguments.force)
    num_bytes = sum(file.size_bytes for file in manifest.files)
    result = {"path": str(path), "files": len(manifest.files), "bytes": num_bytes}
    return 0, result, f"{path}: sealed, {len(manifest.files)} file(s), {num_bytes} bytes"


def _add_arguments_of_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="DIR", help="the folder with the tags")
    parser.add_argument(
        "--keep", type=int, required=True, metavar="N", help="complete tags to keep, 1 or more"
    )


def _prune(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    path = _folder(arguments.path)
    with tags.locked(path):
        deleted = tags.prune(path, arguments.keep)
    kept = [tag.name for tag in tags.whole_tags(path)]
    result = {"path": str(path), "deleted": deleted, "complete": kept}
    names = ", ".join(deleted) or "nothing"
    return 0, result, f"deleted {names}; complete: {', '.join(kept) or 'none'}"


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: not a folder")
    return path
