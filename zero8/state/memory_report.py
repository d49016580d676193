# SPDX-License-Identifier: Apache-2.0
"""The memory report: each parameter's moments, with the reason for their format; gradients."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class MemoryRow:
    """The moments of one parameter in this process.

    Attributes:
        name: the parameter's name, or its index in constructor order.
        shape: its global shape.
        numel: elements that this process holds.
        bits: bits of a code, the mean over moments; 32 where they are float32.
        reason: why the moments have these bits.
        state_bytes: bytes of all moments with their scales.
        correction_bytes: bytes of the corrections of bfloat16 weights, 0 if there are none.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    bits: float
    reason: str
    state_bytes: int
    correction_bytes: int = 0

    def __add__(self, other: "MemoryRow") -> "MemoryRow":
        """Return the row of two parts of one parameter."""
        return replace(
            self,
            numel=self.numel + other.numel,
            state_bytes=self.state_bytes + other.state_bytes,
            correction_bytes=self.correction_bytes + other.correction_bytes,
        )


@dataclass(frozen=True)
class MemoryReport:
    """What the optimizer holds and reads in this process; prints as a table.

    Attributes:
        rows: a row for each parameter that has moments.
        grad_bytes: by dtype, the bytes of the gradients that the next step would read.
    """

    rows: tuple[MemoryRow, ...]
    grad_bytes: Mapping[str, int] = field(default_factory=dict)

    def state_bytes_per_param(self, bits: float | None = None) -> float:
        """Return bytes of moments per element, over the rows with these bits, or all for None."""
        rows = [row for row in self.rows if bits in (None, row.bits)]
        return sum(row.state_bytes for row in rows) / max(1, sum(row.numel for row in rows))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries, for JSON."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        """Return a table with a line per parameter and the totals."""
        width = max([len(row.name) for row in self.rows] + [9])
        lines = [f"{'parameter':{width}}  bits  elements here  state bytes  why"]
        for row in self.rows:
            lines.append(
                f"{row.name:{width}}  {row.bits:4g}  {row.numel:13,}  {row.state_bytes:11,}  "
                f"{row.reason}"
            )
        for bits in sorted({row.bits for row in self.rows if row.numel}):
            numel = sum(row.numel for row in self.rows if row.bits == bits)
            lines.append(
                f"{bits:g}-bit: {numel:,} elements, "
                f"{self.state_bytes_per_param(bits):.3f} state bytes per element"
            )
        lines += [
            f"gradients in {dtype}: {num_bytes:,} bytes"
            for dtype, num_bytes in sorted(self.grad_bytes.items())
        ]
        return "\n".join(lines)
