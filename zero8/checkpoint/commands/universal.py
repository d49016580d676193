# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint universal`: converts a ZeRO checkpoint for another world size, stage or Adam.

DeepSpeed's converter does the work, and `zero8.checkpoint.write.universal_converter` completes its
output.  As DeepSpeed can run code in the files that it reads, it gets checked copies
(`zero8.checkpoint.write.checked_copy`).
"""

import argparse
from pathlib import Path

from zero8 import extras
from zero8.checkpoint.files.tags import folder_of, read_latest
from zero8.checkpoint.write.checked_copy import CheckedCopy

NEXT = (
    'To load it: "checkpoint": {{"load_universal": true}} in the config of DeepSpeed, and\n'
    "engine.load_checkpoint({folder!r})"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder of save_checkpoint")
    parser.add_argument("--tag", help="the checkpoint's tag (default: the latest)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="the folder to make (default: DIR/TAG_universal); latest_universal beside it will "
        "name it.  It takes 12 bytes per parameter, and temporarily 24 more and the size of the "
        "model's states once more",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="let DeepSpeed read the files themselves, not checked copies: it can run code in them",
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        default=2,
        metavar="N",
        help="number of processes; each holds the states of one rank in memory (default: 2)",
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Convert a checkpoint; return the exit status, the result, and the same as text."""
    try:
        result = _convert(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        return 1, {"error": str(error)}, f"zero8 checkpoint universal: {error}"
    lines = [
        f"{result['target']}: {result['parameters']} parameters of ZeRO stage "
        f"{result['zero_stage']} on {result['ranks']} ranks, {result['bytes']} bytes",
        NEXT.format(folder=str(Path(result["target"]).parent)),
    ]
    if result["not_carried"]:
        lines.insert(1, f"not carried over: {', '.join(result['not_carried'])} of the states")
    return 0, result, "\n".join(lines)


def _convert(arguments: argparse.Namespace) -> dict:
    extras.need("deepspeed")
    from zero8.checkpoint.write import universal_converter

    copy = None if arguments.trust else _checked_copy
    source = _source(arguments.folder, arguments.tag)
    target = arguments.out or source.with_name(f"{source.name}_universal")
    result = universal_converter.convert(source, target.absolute(), arguments.workers, copy)
    return result | {"target": str(target)}


def _checked_copy(source: Path, target: Path) -> None:
    from zero8.checkpoint.write import pickled_objects, universal_converter

    known = CheckedCopy(
        pickled_objects.RESTORE, pickled_objects.CONSTANTS, universal_converter.check_content
    )
    known.copy(source, target)


def _source(folder: Path, tag: str | None) -> Path:
    """Return the folder of a tag.

    Raises:
        ValueError: if it does not exist, or no tag is given and there is no latest one.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if tag is None:
        tag = read_latest(folder)
    tags = sorted({path.parent.name for path in folder.glob("*/*_optim_states.pt")})
    if tag is None:
        if any(folder.glob("*_optim_states.pt")):
            hint = f"this is a tag's own; give {folder.absolute().parent} --tag {folder.name}"
        else:
            hint = f"name one of its tags by --tag: {tags}" if tags else "it has no tags either"
        raise ValueError(f"{folder}: got a folder without the file latest; {hint}")
    found = folder_of(folder, tag)
    if found is None:
        raise ValueError(f"{folder}: got tag {tag!r}, expected one of {tags}, and no link")
    return found


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected 1 or more")
    return int(text)
