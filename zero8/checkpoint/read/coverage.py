# SPDX-License-Identifier: Apache-2.0
"""Checks that fragments make whole parameters: every element once, all of one step."""

from dataclasses import dataclass, field
from pathlib import Path

from zero8.checkpoint.read.fragment import Fragment
from zero8.state.table import Piece


@dataclass
class _Param:
    first: Piece
    file: Path
    runs: list[tuple[int, int, Path]] = field(default_factory=list)
    steps: dict[int, Path] = field(default_factory=dict)


class Coverage:
    """Records the fragments of a checkpoint, and reports missing and duplicate elements."""

    def __init__(self):
        """Start empty."""
        self._params: dict[tuple[str, str], _Param] = {}

    def add(self, fragment: Fragment) -> None:
        """Record a fragment; its tensors are not kept.

        Raises:
            ValueError: if its shape or block size differs from the parameter's earlier fragments.
        """
        for piece in fragment.pieces:
            param = self._params.setdefault(fragment.key, _Param(piece, fragment.file))
            got, expected = ((p.shape, p.block_size) for p in (piece, param.first))
            if got != expected:
                raise ValueError(
                    f"{fragment.file}: {fragment.name}: got shape and block size {got}, "
                    f"{param.file.name} has {expected}"
                )
            param.runs.append((piece.first, piece.numel, fragment.file))
            param.steps.setdefault(fragment.step, fragment.file)

    def problems(self) -> list[str]:
        """Return a sentence for each parameter that is not whole."""
        found = []
        for (part, name), param in self._params.items():
            label = f"{part}/{name}" if part else name
            found += [f"{label}: {problem}" for problem in _problems(param)]
        return found


def _problems(param: _Param) -> list[str]:
    found = []
    if len(param.steps) > 1:
        steps = ", ".join(f"{step} in {file.name}" for step, file in sorted(param.steps.items()))
        found.append(f"its parts have taken different numbers of steps: {steps}")
    end = 0
    for first, numel, file in sorted(param.runs):
        if numel and first != end:
            what = "are in no file" if first > end else f"are in {file.name} again"
            begin, stop = sorted((first, end))
            found.append(f"elements {begin} to {stop - 1} {what}")
        end = max(end, first + numel)
    numel = 1
    for size in param.first.shape:
        numel *= size
    if end < numel:
        found.append(f"elements {end} to {numel - 1} are in no file")
    return found
