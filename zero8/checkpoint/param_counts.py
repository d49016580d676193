# SPDX-License-Identifier: Apache-2.0
"""What `zero8 checkpoint inspect` finds of each parameter."""

from dataclasses import dataclass, field

from zero8.checkpoint.statistics import MomentCounts
from zero8.spec.codec import Codec
from zero8.state.header import MOMENTS


@dataclass
class ParamCounts:
    """What is found of one parameter.

    Attributes:
        shape: its global shape.
        block_size: elements per block, 0 for float32 moments.
        codec: None for float32 moments.
        steps: the steps taken; more than one number if parts of it disagree.
        numel: elements found.
        moments: what is counted of each moment.
    """

    shape: tuple[int, ...]
    block_size: int
    codec: Codec | None
    steps: set[int] = field(default_factory=set)
    numel: int = 0
    moments: dict[str, MomentCounts] = field(
        default_factory=lambda: {which: MomentCounts() for which in MOMENTS}
    )

    def entry(self) -> dict:
        """Return a JSON object."""
        quantized = self.codec if self.block_size else None
        return {
            "shape": list(self.shape),
            "numel": self.numel,
            "bits": 8 if self.block_size else 32,
            "block_size": self.block_size,
            "codec": quantized.name if quantized else None,
            "steps": sorted(self.steps),
            **{
                which: counts.summary(getattr(quantized, which) if quantized else None)
                for which, counts in self.moments.items()
            },
        }


Found = dict[tuple[str, str], ParamCounts]
