# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint diff`: which parameters of two checkpoints differ, and by how much."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined import joined
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.read.source import Source

CHUNK_NUMEL = 1 << 22
Read = Callable[[int, int], Tensor]
"""Returns elements of a parameter in float32, given the first and their number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("first", type=Path, metavar="A", help="a checkpoint: folder or file")
    parser.add_argument("second", type=Path, metavar="B", help="another, of any kind")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status (0 equal, 1 different), JSON object and text."""
    first, second = map(open_checkpoint, (arguments.first, arguments.second))
    result = compare(first, second)
    result = {"first": str(arguments.first), "second": str(arguments.second), **result}
    return int(not result["equal"]), result, text(result)


def compare(first: Source, second: Source) -> dict:
    """Return the JSON object without the paths: parameters of one side only, and differences."""
    ours, theirs = set(first.names), set(second.names)
    common = [name for name in first.names if name in theirs]
    params = []
    for name in tqdm(common, desc="diff", unit="param", disable=None):
        sides = (joined(side.fragments(name)) for side in (first, second))
        if entry := _entry(*sides):
            params.append({"name": name, **entry})
    return {
        "equal": not params and ours == theirs,
        "compared": len(common),
        "only_in_first": sorted(ours - theirs),
        "only_in_second": sorted(theirs - ours),
        "different": params,
    }


def text(result: dict) -> str:
    """Return the lines for people."""
    lines = []
    for which in ("first", "second"):
        names = result[f"only_in_{which}"]
        if names:
            lines.append(f"only in {result[which]}: {', '.join(names)}")
    rows = []
    for param in result["different"]:
        for what, difference in param.items():
            if what != "name":
                rows.append([param["name"], what, difference])
    if rows:
        lines.append(tabulate(rows, ["parameter", "what", "difference"], disable_numparse=True))
    same = result["compared"] - len(result["different"])
    lines.append(f"{same} of {result['compared']} parameters in both are equal")
    return "\n".join(lines)


def _entry(first: Fragment, second: Fragment) -> dict:
    """Return the differences of a parameter: a sentence for each entry that differs."""
    entry = {}
    for what, a, b in (
        ("shape", first.shape, second.shape),
        ("step", first.step, second.step),
        ("moments", *([store.name for store in side.stores] for side in (first, second))),
    ):
        if a != b:
            entry[what] = f"{a} and {b}"
    if "shape" in entry or "moments" in entry:
        return entry
    reads: dict[str, tuple[Read, Read]] = {
        a.name: (a.read, b.read) for a, b in zip(first.stores, second.stores, strict=True)
    }
    if first.weights is not None and second.weights is not None:
        reads["weights"] = _reader(first.weights), _reader(second.weights)
    for what, (a, b) in reads.items():
        if difference := _difference(first.piece.numel, a, b):
            entry[what] = difference
    return entry


def _reader(values: Tensor) -> Read:
    return lambda begin, numel: values.flatten()[begin : begin + numel].float()


def _difference(numel: int, first: Read, second: Read) -> str:
    """Return how many elements differ, and by how much; "" if none does."""
    differing, largest = 0, 0.0
    for begin in range(0, numel, CHUNK_NUMEL):
        length = min(CHUNK_NUMEL, numel - begin)
        a, b = first(begin, length), second(begin, length)
        differ = (a != b) & ~(a.isnan() & b.isnan())
        differing += int(differ.sum())
        relative = torch.where(differ, (a - b).abs() / torch.maximum(a.abs(), b.abs()), 0.0)
        largest = max(largest, float(relative.nan_to_num(math.inf).max()))
    share = f"{differing} of {numel} elements by up to {100 * largest:.2g} % of the value"
    return share if differing else ""
