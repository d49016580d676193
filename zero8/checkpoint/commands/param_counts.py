# SPDX-License-Identifier: Apache-2.0
"""The counts of `zero8 checkpoint inspect` for each parameter."""

from dataclasses import dataclass, field

from zero8.checkpoint.read.statistics import MomentCounts
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import Codec, MomentCode


@dataclass
class ParamCounts:
    """The counts of one parameter.

    Attributes:
        shape: its global shape.
        block_size: elements per block, 0 for float32 moments.
        codec: None for float32 moments.
        steps: the steps taken; several numbers if its parts disagree.
        numel: elements found.
        algorithm: the algorithm of the moments.
        moments: the counts of each moment, by name.
    """

    shape: tuple[int, ...]
    block_size: int
    codec: Codec | None
    algorithm: Algorithm
    steps: set[int] = field(default_factory=set)
    numel: int = 0
    moments: dict[str, MomentCounts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with empty counts."""
        self.moments = {name: MomentCounts() for name in self.algorithm.moment_names}

    def code_of(self, name: str) -> MomentCode | None:
        """Return the code of a moment, None if it is in float32."""
        if self.codec is None or not self.block_size:
            return None
        return self.codec.code_of(self.algorithm.moment(name))

    def entry(self) -> dict:
        """Return a JSON object."""
        quantized = self.codec if self.block_size else None
        bits = quantized.bits_of(self.algorithm.moments) if quantized else 32
        return {
            "shape": list(self.shape),
            "numel": self.numel,
            "bits": bits,
            "block_size": self.block_size,
            "codec": quantized.name if quantized else None,
            "steps": sorted(self.steps),
            **{name: counts.summary(self.code_of(name)) for name, counts in self.moments.items()},
        }


Found = dict[tuple[str, str], ParamCounts]
