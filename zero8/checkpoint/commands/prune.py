# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint prune`: deletes old tags of a folder, never its last complete one."""

import argparse
from pathlib import Path

from zero8.files import tags
from zero8.files.folder_lock import locked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=Path, metavar="DIR", help="the folder with the tags")
    parser.add_argument(
        "--keep", type=int, required=True, metavar="N", help="complete tags to keep, 1 or more"
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    if not arguments.path.is_dir():
        raise NotADirectoryError(f"{arguments.path}: not a folder")
    with locked(arguments.path):
        deleted = tags.prune(arguments.path, arguments.keep)
    kept = [tag.name for tag in tags.whole_tags(arguments.path)]
    result = {"path": str(arguments.path), "deleted": deleted, "complete": kept}
    names = ", ".join(deleted) or "nothing"
    return 0, result, f"deleted {names}; complete: {', '.join(kept) or 'none'}"
