# SPDX-License-Identifier: Apache-2.0
"""The header of a saved state, which makes it readable without a model.

The entry `format` of a whole parameter's state is an int64 tensor:

    format version, algorithm, codes, block size, identity, global shape

The algorithm names the moments.  `codes` has a byte for each of them, the first one in the lowest:
the number of its codec, 0 for float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import ALGORITHMS, algorithm_called
from zero8.spec.buffers import check_entry
from zero8.spec.codec import Codec, codec_numbered
from zero8.spec.grid import MAX_DIMS
from zero8.spec.shown import shown, shown_keys
from zero8.state.table import Piece

Entries = dict[str, Any]
"""The state of one parameter, live or as loaded."""

FORMAT_VERSION = 1


@dataclass(frozen=True)
class StateHeader:
    """The entry `format` of a state.

    Attributes:
        algorithm: the algorithm of the moments.
        codec: the codec of all moments, None for float32 moments.
        block_size: elements per block, 0 for float32 moments.
        identity: the parameter's 64-bit identity (`zero8.spec.dither.identity_of`).
        shape: the parameter's global shape.
    """

    algorithm: Algorithm
    codec: Codec | None
    block_size: int
    identity: int
    shape: tuple[int, ...]

    def packed(self) -> Tensor:
        """Return the entry."""
        number = 0 if self.codec is None else self.codec.number
        codes = sum(number << 8 * place for place in range(len(self.algorithm.moments)))
        numbers = [FORMAT_VERSION, self.algorithm.number, codes, self.block_size, self.identity]
        return torch.tensor([*numbers, *self.shape], device="cpu")

    @classmethod
    def of(cls, entries: Entries, name: str) -> "StateHeader":
        """Return the header of a parameter's state; raise ValueError if it has no valid one."""
        if "format" not in entries:
            raise ValueError(
                f"state of {name}: got entries {shown_keys(entries)}, without format; expected a "
                f"state of {' or '.join(one.class_name for one in ALGORITHMS)} (load_state_dict "
                "also reads states of fp32 optimizers)"
            )
        packed = entries["format"]
        if not isinstance(packed, Tensor) or packed.dtype != torch.int64 or packed.ndim != 1:
            raise ValueError(
                f"state of {name}: got a format that is not a row of int64: {shown(packed)}"
            )
        if packed.numel() > 5 + MAX_DIMS:
            raise ValueError(f"state entry format of {name}: got {packed.numel()} numbers")
        check_entry(f"state entry format of {name}", packed, max(packed.numel(), 5), [torch.int64])
        if not any(packed.tolist()):
            raise ValueError(
                f"state of {name}: got a format of zeros, as in a state whose tensors were all set "
                "to 0; to begin anew, use optimizer.state.clear() instead"
            )
        version, algorithm_number, codes, block_size, identity, *shape = packed.tolist()
        check_version(f"state of {name}", version)
        algorithm = algorithm_of(f"state of {name}", algorithm_number)
        codec = _codec_of(f"state of {name}", algorithm, codes) if block_size else None
        return cls(algorithm, codec, block_size, identity, tuple(shape))

    def piece(self, name: str) -> Piece:
        """Return the whole parameter as a piece."""
        numel = math.prod(self.shape)
        return Piece(0, numel, 0, self.shape, self.identity, self.block_size, name)


def _codec_of(what: str, algorithm: Algorithm, codes: int) -> Codec:
    """Return the codec of all moments from the number `codes` of a header."""
    numbers = {codes >> 8 * place & 0xFF for place in range(len(algorithm.moments))}
    if len(numbers) > 1 or codes >> 8 * len(algorithm.moments):
        raise ValueError(
            f"{what}: got codes {codes:#x}, expected one codec for the moments "
            f"{algorithm.moment_names}"
        )
    return codec_numbered(numbers.pop())


def check_version(what: str, version: object) -> None:
    """Raise ValueError unless this is the version of the format that this zero8 reads."""
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"{what}: got format version {shown(version)}, this zero8 reads {FORMAT_VERSION}"
        )


def algorithm_of(what: str, name_or_number: object) -> Algorithm:
    """Return the algorithm with this name or number; `what` begins the message of ValueError."""
    try:
        return algorithm_called(name_or_number)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
