# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint diff`: which parameters of two checkpoints differ, and by how many codes."""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from tqdm import tqdm

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.read.statistics import NUM_CODES, order_of_codes
from zero8.state.table import Piece

CHUNK_NUMEL = 1 << 22
Fragments = dict[tuple[str, str], list[Fragment]]


@dataclass
class MomentDifference:
    """The differences of a moment of one parameter.

    Attributes:
        compared: elements compared.
        differing: elements with different codes, or values if the sides' blocks or codecs differ.
        largest: the largest difference, in codes; None if values were compared.
        largest_relative: the largest difference of values, relative to the larger of the two.
        scales: blocks, or parts of blocks, with different scales.
    """

    compared: int = 0
    differing: int = 0
    largest: int | None = None
    largest_relative: float | None = None
    scales: int = 0

    @property
    def is_none(self) -> bool:
        """Whether nothing differs."""
        return not self.differing and not self.scales


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
    ):
        if a != b:
            entry[what] = f"{a} and {b}"
    if "shape" in entry:
        return entry
    names = [[store.name for store in side[0].stores] for side in (first, second)]
    if names[0] != names[1]:
        return {**entry, "moments": f"{names[0]} and {names[1]}"}
    for number, name in enumerate(names[0]):
        difference = _moment(number, first, second)
        if not difference.is_none:
            entry[name] = _sentence(difference)
    weights = _weights(first, second)
    if weights:
        entry["weights"] = f"{weights} elements differ"
    return entry


def _sentence(d: MomentDifference) -> str:
    parts = []
    if d.differing:
        share = f"{d.differing} of {d.compared} elements"
        by = (
            f"by up to {d.largest} code(s)"
            if d.largest is not None
            else f"by up to {100 * d.largest_relative:.2g} % of the value"
        )
        parts.append(f"{share} {by}")
    if d.scales:
        parts.append(f"{d.scales} scale(s)")
    return ", ".join(parts)


def _overlaps(
    first: list[Fragment], second: list[Fragment]
) -> Iterator[tuple[Fragment, Piece, Fragment, Piece, int, int]]:
    """Yield fragment and piece of both sides, and the range of elements that both have."""
    ours, theirs = _in_order(first), _in_order(second)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        (a, p), (b, q) = ours[i], theirs[j]
        begin, ends = max(p.first, q.first), (p.first + p.numel, q.first + q.numel)
        if begin < min(ends):
            yield a, p, b, q, begin, min(ends)
        i, j = (i + 1, j) if ends[0] <= ends[1] else (i, j + 1)


def _in_order(fragments: list[Fragment]) -> list[tuple[Fragment, Piece]]:
    runs = [(fragment, piece) for fragment in fragments for piece in fragment.pieces]
    return sorted(runs, key=lambda run: run[1].first)


def _moment(number: int, first: list[Fragment], second: list[Fragment]) -> MomentDifference:
    found = MomentDifference()
    for a, p, b, q, begin, end in _overlaps(first, second):
        ours, theirs = a.stores[number], b.stores[number]
        found.compared += end - begin
        same_grid = p.block_size == q.block_size > 0 and ours.codec == theirs.codec
        compare_parts = _compare_codes if same_grid else _compare_values
        compare_parts(found, ours, p, theirs, q, begin, end)
    return found


def _compare_codes(found, ours, p, theirs, q, begin, end) -> None:
    found.largest = found.largest or 0
    order = order_of_codes(ours.code)
    place = torch.zeros(NUM_CODES, dtype=torch.int64, device="cpu")
    place[order] = torch.arange(len(order), device="cpu")
    one, other_one = ours.table.pieces.index(p), theirs.table.pieces.index(q)
    scales, other_scales = ours.piece(one).scales, theirs.piece(other_one).scales
    for at in range(begin, end, CHUNK_NUMEL):
        stop = min(at + CHUNK_NUMEL, end)
        a = ours.codes_of(one, at - p.first, stop - p.first)
        b = theirs.codes_of(other_one, at - q.first, stop - q.first)
        if torch.equal(a, b):
            continue
        distance = (place[a.to(torch.int64)] - place[b.to(torch.int64)]).abs()
        found.differing += int((distance > 0).sum())
        found.largest = max(found.largest, int(distance.max()))
    grid = p.grid
    first_block, last_block = grid.block_of(begin), grid.block_of(end - 1)
    mine = scales[first_block - grid.block_of(p.first) : last_block + 1 - grid.block_of(p.first)]
    other = other_scales[
        first_block - grid.block_of(q.first) : last_block + 1 - grid.block_of(q.first)
    ]
    found.scales += int((mine != other).view(len(mine), -1).any(1).sum())


def _compare_values(found, ours, p, theirs, q, begin, end) -> None:
    for at in range(begin, end, CHUNK_NUMEL):
        numel = min(at + CHUNK_NUMEL, end) - at
        a = ours.read(p.start + at - p.first, numel)
        b = theirs.read(q.start + at - q.first, numel)
        found.differing += int((a != b).sum())
        larger = torch.maximum(a.abs(), b.abs())
        relative = torch.where(larger > 0, (a - b).abs() / larger, 0.0)
        found.largest_relative = max(found.largest_relative or 0.0, float(relative.max()))


def _weights(first: list[Fragment], second: list[Fragment]) -> int:
    """Return the number of differing master weights, among those in both checkpoints."""
    count = 0
    for a, p, b, q, begin, end in _overlaps(first, second):
        if a.weights is None or b.weights is None:
            continue
        x = a.weights[p.start + begin - p.first : p.start + end - p.first]
        y = b.weights[q.start + begin - q.first : q.start + end - q.first]
        count += int((x.float() != y.float()).sum())
    return count
