# SPDX-License-Identifier: Apache-2.0
"""The shapes of a model's parameters."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zero8.plan.architectures import shapes_of

SIDE = 4096
"""Rows and columns of the matrices that a model of unknown shapes is assumed to have."""

Param = tuple[str, tuple[int, ...]]
"""A parameter's name and shape."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Model:
    """A model's parameters.

    Attributes:
        title: its name in reports.
        params: name and shape of every parameter, in the engine's order.
    """

    title: str
    params: tuple[Param, ...]

    @classmethod
    def of_size(cls, text: str) -> "Model":
        """Return a model with a number of parameters such as "8B", and unknown shapes.

        It is assumed to be matrices of 4096 x 4096, the last one shorter: all moments are 8-bit, in
        whole blocks, and no parameter is large.

        Raises:
            ValueError: if the text is not a size of at least one row.
        """
        found = re.fullmatch(r"(\d+(?:\.\d*)?)([KMBT]?)", text.strip().upper())
        numel = round(float(found[1]) * UNITS[found[2]]) if found else 0
        if numel < SIDE:
            raise ValueError(
                f"--parameters: got {text!r}, expected a size such as 350M, 8B or 1.5T, of at "
                f"least {SIDE}"
            )
        whole, rest = divmod(numel // SIDE, SIDE)
        rows = [SIDE] * whole + [rest] * bool(rest)
        params = tuple((f"matrix.{number}", (n, SIDE)) for number, n in enumerate(rows))
        return cls(f"{text} parameters, taken as matrices of {SIDE} x {SIDE}", params)

    @classmethod
    def of_file(cls, path: Path) -> "Model":
        """Return the model of a `config.json`, or of a JSON object of names and shapes.

        Raises:
            ValueError: if the file is neither.
            OSError: if it cannot be read.
        """
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        if not isinstance(content, dict) or not content:
            raise ValueError(f"{path}: expected a JSON object that is not empty")
        if all(_is_shape(value) for value in content.values()):
            params = tuple((name, tuple(shape)) for name, shape in content.items())
        else:
            params = tuple(shapes_of(content))
        model = cls("", params)
        return cls(f"{path}, {model.numel / 1e9:.4g}B parameters", params)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for _, shape in self.params)

    @cached_property
    def largest_numel(self) -> int:
        """Number of elements of the largest parameter."""
        return max(math.prod(shape) for shape in self.shapes)

    @cached_property
    def shapes(self) -> Counter[tuple[int, ...]]:
        """The number of parameters of each shape."""
        return Counter(shape for _, shape in self.params)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
