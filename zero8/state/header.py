# SPDX-License-Identifier: Apache-2.0
"""What a saved state says of itself, so that it can be read without a model.

The entry `format` of a whole parameter's state is an int64 tensor:

    format version, algorithm, codec number (0: float32 moments), block size, identity, global shape

The algorithm names the moments; format 1, whose states are read, had no such number.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero8.spec.buffers import check_entry
from zero8.spec.grid import MAX_DIMS
from zero8.spec.shown import shown, shown_keys
from zero8.state.table import Piece

Entries = dict[str, Any]
"""The state of one parameter, live or as loaded."""

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
ALGORITHM = "adam"
ALGORITHMS = {ALGORITHM: 1}
"""Names of algorithms, as ZeRO's states have them, and their numbers in `format`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What an algorithm remembers: those of Adam."""


@dataclass(frozen=True)
class Header:
    """The entry `format` of a state.

    Attributes:
        codec: the codec's number, 0 for float32 moments.
        block_size: elements per block, 0 for float32 moments.
        identity: the parameter's 64-bit identity (`zero8.spec.dither.identity_of`).
        shape: the parameter's global shape.
    """

    codec: int
    block_size: int
    identity: int
    shape: tuple[int, ...]

    def packed(self) -> Tensor:
        """Return the entry."""
        numbers = [FORMAT_VERSION, ALGORITHMS[ALGORITHM], self.codec, self.block_size]
        return torch.tensor([*numbers, self.identity, *self.shape], device="cpu")

    @classmethod
    def of(cls, entries: Entries, name: str) -> "Header":
        """Return the header of a state's entries, that of the parameter called `name`.

        Raises:
            ValueError: if there is none, or none that this version reads.
        """
        if "format" not in entries:
            raise ValueError(
                f"state of {name}: got entries {shown_keys(entries)}, without format; expected a "
                "state of Adam8bitBlockwise (load_state_dict reads those of an fp32 Adam too)"
            )
        packed = entries["format"]
        if not isinstance(packed, Tensor) or packed.dtype != torch.int64 or packed.ndim != 1:
            raise ValueError(
                f"state of {name}: got a format that is no row of int64: {shown(packed)}"
            )
        if packed.numel() > 5 + MAX_DIMS:
            raise ValueError(f"state entry format of {name}: got {packed.numel()} numbers")
        check_entry(f"state entry format of {name}", packed, max(packed.numel(), 4), [torch.int64])
        version, *numbers = packed.tolist()
        check_version(f"state of {name}", version)
        if version == 1:
            numbers.insert(0, ALGORITHMS[ALGORITHM])
        check_algorithm(f"state of {name}", numbers[0])
        if len(numbers) < 4:
            raise ValueError(f"state entry format of {name}: got {packed.numel()} numbers")
        _, codec, block_size, identity, *shape = numbers
        return cls(codec, block_size, identity, tuple(shape))

    def piece(self, name: str) -> Piece:
        """Return the whole parameter as a piece."""
        numel = math.prod(self.shape)
        return Piece(0, numel, 0, self.shape, self.identity, self.block_size, name)


def check_version(what: str, version: object) -> None:
    """Raise ValueError unless this zero8 reads a version of the format."""
    if type(version) is not int or version not in READABLE_VERSIONS:
        raise ValueError(
            f"{what}: got format version {shown(version)}, this zero8 reads "
            f"{list(READABLE_VERSIONS)}"
        )


def check_algorithm(what: str, algorithm: object) -> None:
    """Raise ValueError unless a state's algorithm, a number or a name, is Adam."""
    known = isinstance(algorithm, str | int) and algorithm in (ALGORITHM, ALGORITHMS[ALGORITHM])
    if not known:
        raise ValueError(
            f"{what}: got a state of algorithm {shown(algorithm)}, expected {ALGORITHM!r} "
            f"({ALGORITHMS[ALGORITHM]})"
        )
