# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint seal`: writes a manifest for a folder of another writer."""

import argparse
from pathlib import Path

from zero8.files import seal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path", type=Path, metavar="DIR", help="a folder that is completely written"
    )
    parser.add_argument("--force", action="store_true", help="also if it is marked as incomplete")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    if not arguments.path.is_dir():
        raise NotADirectoryError(f"{arguments.path}: not a folder")
    manifest = seal.seal(arguments.path, force=arguments.force)
    num_bytes = sum(file.size_bytes for file in manifest.files)
    result = {"path": str(arguments.path), "files": len(manifest.files), "bytes": num_bytes}
    return 0, result, f"{arguments.path}: sealed, {len(manifest.files)} file(s), {num_bytes} bytes"
