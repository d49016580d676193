# SPDX-License-Identifier: Apache-2.0
"""The counts of `zero8 checkpoint inspect` for each parameter."""

import math
from dataclasses import dataclass

from zero8.checkpoint.read.joined import Parameter
from zero8.checkpoint.read.source import Key
from zero8.checkpoint.read.statistics import MomentCounts
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import Codec, MomentCode


@dataclass(frozen=True)
class ParamCounts:
    """The counts of one parameter.

    Attributes:
        shape: its global shape.
        block_size: elements per block, 0 for float32 moments.
        codec: None for float32 moments.
        algorithm: the algorithm of the moments.
        step: the steps taken.
        moments: the counts of each moment, by name.
    """

    shape: tuple[int, ...]
    block_size: int
    codec: Codec | None
    algorithm: Algorithm
    step: int
    moments: dict[str, MomentCounts]

    @classmethod
    def of(cls, parameter: Parameter) -> "ParamCounts":
        """Count the moments of a parameter."""
        piece, stores = parameter.piece, parameter.stores
        codec = stores[0].codec if piece.is_quantized else None
        moments = {store.name: MomentCounts.of(store) for store in stores}
        return cls(
            piece.shape, piece.block_size, codec, parameter.algorithm, parameter.step, moments
        )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def code_of(self, name: str) -> MomentCode | None:
        """Return the code of a moment, None if it is in float32."""
        return self.codec.code_of(self.algorithm.moment(name)) if self.codec else None

    def entry(self) -> dict:
        """Return a JSON object."""
        return {
            "shape": list(self.shape),
            "numel": self.numel,
            "bits": self.codec.bits_of(self.algorithm.moments) if self.codec else 32,
            "block_size": self.block_size,
            "codec": self.codec.name if self.codec else None,
            "step": self.step,
            **{name: counts.summary(self.code_of(name)) for name, counts in self.moments.items()},
        }


Found = dict[Key, ParamCounts]
