# SPDX-License-Identifier: Apache-2.0
"""What the optimizer knows of a parameter: its name, its place, its shape."""

from dataclasses import dataclass

from zero8.spec import dither


@dataclass(frozen=True)
class ParamInfo:
    """What policy and dither know of a parameter: its name if it has one, its place, its shape."""

    name: str | None
    index: int
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name, or the index in constructor order."""
        return str(self.index) if self.name is None else self.name

    @property
    def identity(self) -> int:
        """The 64-bit identity that the dither depends on."""
        return dither.identity_of(self.index if self.name is None else self.name)
