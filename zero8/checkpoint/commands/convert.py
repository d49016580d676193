# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint convert`: converts a checkpoint of one framework for another.

If the target is 8-bit, moments keep their codes and scales; only blocks that a shard boundary
cuts are re-encoded (`zero8.checkpoint.read.joined`).  If it is float32, moments are those that the
codes stand for.  Everything is read and checked before the output is written, and the output
appears only when it is complete.

Memory: joined tensors are in mapped temporary files beside the output.  They and the files that are
read leave the process's memory after each parameter, but `dcp` needs all of its own at once, and
`bitsandbytes` all codes.  Besides, it needs one parameter of a folder of
torch.distributed.checkpoint, and 4 bytes for each element of one parameter that is decoded.  Disk:
temporarily what the joined tensors take, for `zero` and `fp32` with moments of 4 bytes.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zero8.checkpoint.read import contents as contents_of
from zero8.checkpoint.read.contents import Contents
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.write.dcp_writer import write_dcp
from zero8.checkpoint.write.plain_writer import write_bitsandbytes, write_fp32, write_plain
from zero8.checkpoint.write.universal_writer import name_latest, write_universal
from zero8.files.atomic import made_beside
from zero8.files.inside import release
from zero8.files.scratch import mapped_tensor

Write = Callable[[Contents, Path], None]

_LOADED = "torch.load({out!r}){key}"

TARGETS: dict[str, tuple[Write, str]] = {
    "zero": (
        write_universal,
        'in the config of DeepSpeed: "checkpoint": {{"load_universal": true}}; then\n'
        "engine.load_checkpoint({folder!r})",
    ),
    "dcp": (
        write_dcp,
        'torch.distributed.checkpoint.load({{"model": ..., "optimizer": ...}}, '
        "checkpoint_id={out!r})",
    ),
    "plain": (write_plain, f"optimizer.load_state_dict({_LOADED})"),
    "fp32": (write_fp32, f"torch.optim.AdamW: .load_state_dict({_LOADED})"),
    "bitsandbytes": (
        write_bitsandbytes,
        f"bitsandbytes.optim.AdamW8bit: .load_state_dict({_LOADED})",
    ),
}
"""By name: the function that writes it, and how to load it."""
DECODED = {"zero", "fp32"}
"""Targets whose moments are float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        metavar="IN",
        type=Path,
        help="a file of torch.save, or a folder of torch.distributed.checkpoint or of DeepSpeed",
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="the output; it must not exist")
    parser.add_argument(
        "--to",
        required=True,
        choices=list(TARGETS),
        help="zero: a folder that DeepSpeed's engines load as universal checkpoint, at any stage "
        "and number of ranks; latest_universal beside it names it; dcp: a folder of "
        "torch.distributed.checkpoint, for FSDP2; plain: a file of torch.save; fp32: a file "
        "with float32 moments for torch's AdamW; bitsandbytes: a file for its AdamW8bit",
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Convert a checkpoint; return the exit status, the result, and the same as text."""
    result = convert(arguments.source, arguments.target, arguments.to)
    key = '["optimizer"]' if result["has_weights"] else ""
    how = TARGETS[arguments.to][1].format(
        out=str(arguments.target), folder=str(arguments.target.parent), key=key
    )
    lines = [
        "{target}: {parameters} parameters with moments, {bytes} bytes".format(**result),
        *result["notes"],
        f"To load it: {how}",
    ]
    return 0, result, "\n".join(lines)


def convert(source: Path, target: Path, to: str) -> dict:
    """Convert a checkpoint to a target, a key of TARGETS; return a summary."""
    write, _ = TARGETS[to]
    with made_beside(target.absolute()) as made:
        opened = open_checkpoint(source)
        empty, free = partial(mapped_tensor, made.parent), partial(release, source, made.parent)
        found = contents_of.read(opened, empty, to in DECODED, free)
        write(found, made)
    if write is write_universal:
        name_latest(target.absolute())
    if missing := [name for name in found.parameters if name not in found.model]:
        found.notes.append(f"got no weights of {len(missing)} parameters, such as {missing[0]}")
    return {
        "source": str(source),
        "kind": opened.kind,
        "ranks": opened.world_size,
        "target": str(target),
        "to": to,
        "parameters": len(found.parameters),
        "steps": max(parameter.step for parameter in found.parameters.values()),
        "bytes": _bytes(target),
        "has_weights": bool(found.model),
        "notes": found.notes,
    }


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
