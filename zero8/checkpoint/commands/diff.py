# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint diff`: which parameters of two checkpoints differ, and by how much."""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.open import open_checkpoint

CHUNK_NUMEL = 1 << 22
Fragments = dict[tuple[str, str], list[Fragment]]
Read = Callable[[Fragment, int, int], Tensor | None]
"""Returns elements of a fragment, given as begin and length in its tensors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("first", type=Path, metavar="A", help="a checkpoint: folder or file")
    parser.add_argument("second", type=Path, metavar="B", help="another, of any kind")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status (0 equal, 1 different), JSON object and text."""
    first, second = (_by_param(path) for path in (arguments.first, arguments.second))
    result = compare(first, second)
    result = {"first": str(arguments.first), "second": str(arguments.second), **result}
    return int(not result["equal"]), result, text(result)


def compare(first: Fragments, second: Fragments) -> dict:
    """Return the JSON object without the paths: parameters of one side only, and differences."""
    common = [key for key in first if key in second]
    params = []
    for key in tqdm(common, desc="diff", unit="param", disable=None):
        entry = _entry(first[key], second[key])
        if entry:
            params.append({"name": "/".join(filter(None, key)), **entry})
    only = [
        sorted("/".join(filter(None, k)) for k in a if k not in b)
        for a, b in ((first, second), (second, first))
    ]
    return {
        "equal": not params and not any(only),
        "compared": len(common),
        "only_in_first": only[0],
        "only_in_second": only[1],
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


def _by_param(path: Path) -> Fragments:
    """Return the fragments of a checkpoint by parameter; files stay mapped, not read."""
    found: Fragments = defaultdict(list)
    for fragment in open_checkpoint(path).all_fragments():
        found[fragment.key].append(fragment)
    return dict(found)


def _entry(first: list[Fragment], second: list[Fragment]) -> dict:
    """Return the differences of a parameter: a sentence for each entry that differs."""
    entry = {}
    for what, a, b in (
        ("shape", first[0].pieces[0].shape, second[0].pieces[0].shape),
        ("step", sorted({f.step for f in first}), sorted({f.step for f in second})),
        ("moments", *([store.name for store in f[0].stores] for f in (first, second))),
    ):
        if a != b:
            entry[what] = f"{a} and {b}"
    if "shape" in entry or "moments" in entry:
        return entry
    reads: dict[str, Read] = {
        store.name: lambda fragment, begin, numel, at=at: fragment.stores[at].read(begin, numel)
        for at, store in enumerate(first[0].stores)
    }
    if all(fragment.weights is not None for fragment in first + second):
        reads["weights"] = lambda fragment, begin, n: fragment.weights[begin : begin + n].float()
    for what, read in reads.items():
        if difference := _difference(first, second, read):
            entry[what] = difference
    return entry


def _difference(first: list[Fragment], second: list[Fragment], read: Read) -> str:
    """Return how many elements differ, and by how much; "" if none does."""
    numel = math.prod(first[0].pieces[0].shape)
    differing, largest = 0, 0.0
    for begin in range(0, numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, numel)
        a, b = (_values(side, read, begin, end) for side in (first, second))
        differing += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        larger = torch.maximum(a.abs(), b.abs())
        relative = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
        largest = max(largest, float(relative.nan_to_num(math.inf).max()))
    share = f"{differing} of {numel} elements by up to {100 * largest:.2g} % of the value"
    return share if differing else ""


def _values(fragments: list[Fragment], read: Read, begin: int, end: int) -> Tensor:
    """Return elements of a parameter, NaN for those that no fragment has."""
    values = torch.full((end - begin,), math.nan, device="cpu")
    for fragment in fragments:
        for piece in fragment.pieces:
            low, high = max(begin, piece.first), min(end, piece.first + piece.numel)
            if low < high:
                found = read(fragment, piece.start + low - piece.first, high - low)
                values[low - begin : high - begin] = found
    return values
