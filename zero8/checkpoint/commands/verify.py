# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint verify`: checks that a checkpoint is whole.

It compares the files with the manifest, if there is one, which costs one read of all of them; it
reads the states and checks their values; and every element of every parameter must exist once.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

from zero8.checkpoint.read.joined import joined
from zero8.checkpoint.read.open import located, open_checkpoint
from zero8.checkpoint.read.source import Source, in_threads, sizes_bytes
from zero8.files.manifest import Manifest
from zero8.files.tags import INCOMPLETE, tag_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=Path, metavar="DIR", help="a checkpoint: folder or file")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status (0 whole, 1 damaged), JSON object and text."""
    began = time.perf_counter()
    if not os.path.lexists(arguments.path):
        raise FileNotFoundError(f"{arguments.path}: not found")
    source, folder, problems = None, arguments.path, []
    try:
        folder, _ = located(arguments.path)
        source = open_checkpoint(folder)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    listed, damages = _against_manifest(folder)
    problems = damages + problems
    if source:
        problems += _contents(source)
    read = (listed or {}) | (sizes_bytes(source.files) if source else {})
    num_bytes = sum(read.values())
    seconds = time.perf_counter() - began
    result = {
        "path": str(folder),
        "whole": not problems,
        "manifest": listed is not None,
        "problems": problems,
        "files": len(read),
        "bytes": num_bytes,
        "seconds": round(seconds, 3),
        "gb_per_s": round(num_bytes / seconds / 1e9, 3),
    }
    return int(bool(problems)), result, _text(result)


def _against_manifest(folder: Path) -> tuple[dict[Path, int] | None, list[str]]:
    """Return the files in a manifest with their sizes, None without one, and their damages."""
    if not folder.is_dir():
        return None, []
    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        is_incomplete = tag_at(folder).state == INCOMPLETE
        what = f"{folder} is incomplete: saving or deleting it was interrupted"
        return None, [what] if is_incomplete else []
    except ValueError as error:
        return {}, [str(error)]
    files = list(manifest.files)
    checked = in_threads("hashes", files, partial(manifest.damage_of, folder))
    found = [str(damage) for _, damage in checked if damage]
    try:
        found += map(str, manifest.unlisted(folder))
    except (ValueError, OSError) as error:
        found.append(str(error))
    return {folder / file.path: file.size_bytes for file in files}, found


def _contents(source: Source) -> list[str]:
    """Return the damages of the states."""

    def check(name: str) -> str:
        try:
            joined(source.fragments(name), with_weights=False)
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    found = in_threads("contents", source.names, check)
    return source.damages + [problem for _, problem in found if problem]


def _text(result: dict) -> str:
    checked = "hashes and contents" if result["manifest"] else "contents; it has no manifest"
    speed = f"{result['bytes'] / 2**20:.1f} MiB, {result['gb_per_s']:.2f} GB/s"
    if result["whole"]:
        return f"{result['path']}: whole ({checked}; {result['files']} file(s), {speed})"
    return "\n".join([f"{result['path']}: damaged", *(f"  {p}" for p in result["problems"])])
