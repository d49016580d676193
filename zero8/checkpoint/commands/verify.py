# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint verify`: checks that a checkpoint is whole.

It compares the files with the manifest, if there is one, which costs one read of all of them; it
reads the states and checks their values; and every element of every parameter must exist once.
"""

import argparse
import os
from functools import partial
from pathlib import Path

from zero8.checkpoint.read.joined import joined
from zero8.checkpoint.read.open import located, open_checkpoint
from zero8.checkpoint.read.source import Source, in_threads
from zero8.files.manifest import Manifest
from zero8.files.tags import DAMAGED, INCOMPLETE, UNVERIFIED, tag_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=Path, metavar="DIR", help="a checkpoint: folder or file")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status (0 whole, 1 damaged), JSON object and text."""
    if not os.path.lexists(arguments.path):
        raise FileNotFoundError(f"{arguments.path}: not found")
    source, folder, problems = None, arguments.path, []
    try:
        folder, _ = located(arguments.path)
        source = open_checkpoint(folder)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    has_manifest, damages = _against_manifest(folder)
    problems = damages + problems
    if source:
        problems += _contents(source)
    result = {
        "path": str(folder),
        "whole": not problems,
        "manifest": has_manifest,
        "problems": problems,
    }
    return int(bool(problems)), result, _text(result)


def _against_manifest(folder: Path) -> tuple[bool, list[str]]:
    """Return whether a folder has a manifest, and how it differs from that."""
    tag = tag_at(folder) if folder.is_dir() else None
    if tag is None or tag.state == UNVERIFIED:
        return False, []
    if tag.state == INCOMPLETE:
        return False, [f"{folder} is incomplete: saving or deleting it was interrupted"]
    if tag.state == DAMAGED:
        return True, [tag.problem]
    manifest = Manifest.read(folder)
    checked = in_threads("hashes", list(manifest.files), partial(manifest.damage_of, folder))
    found = [damage for _, damage in checked if damage]
    return True, [str(damage) for damage in found + manifest.unlisted(folder)]


def _contents(source: Source) -> list[str]:
    """Return the damages of the states."""

    def check(name: str) -> str:
        try:
            joined(source.fragments(name), with_weights=False)
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    found = in_threads("contents", source.names, check)
    return [problem for _, problem in found if problem]


def _text(result: dict) -> str:
    if result["whole"]:
        checked = "hashes and contents" if result["manifest"] else "contents; it has no manifest"
        return f"{result['path']}: whole ({checked})"
    return "\n".join([f"{result['path']}: damaged", *(f"  {p}" for p in result["problems"])])
