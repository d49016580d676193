# SPDX-License-Identifier: Apache-2.0
"""The speed of a step on one core, in ns per parameter."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """ns per parameter of one thread, over data that does not fit in the cache.

    Attributes:
        fp32_adam: an fp32 Adam, float32 weights.
        zero8: zero8, float32 weights.
        zero8_bf16: zero8, bf16 weights and gradients.
        source: the source of the numbers.
    """

    fp32_adam: float
    zero8: float
    zero8_bf16: float
    source: str

    def of(self, weight_bytes: int) -> tuple[float, float]:
        """Return ns per parameter of an fp32 Adam and of zero8, for weights of this many bytes.

        An fp32 Adam is assumed to be as fast on bf16 weights as on float32 ones.
        """
        return self.fp32_adam, self.zero8 if weight_bytes == 4 else self.zero8_bf16


RECORDED = Rates(1.635, 1.092, 1.239, "benchmarks/records/plan_cpu_202611.md")
"""One core of the Xeon with AVX-512 in that record."""
