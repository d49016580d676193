# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters whose moments a load has encoded with other settings than saved."""

from collections import Counter

from zero8.spec.codec import Codec
from zero8.state.tell import tell_once


class Reencoded:
    """Counts of parameters, by the form in which their moments were saved and the one kept."""

    def __init__(self) -> None:
        """Start without counts."""
        self._counts: Counter[tuple[str, str]] = Counter()

    def note(self, saved: tuple[Codec | None, int], kept: tuple[Codec | None, int]) -> None:
        """Count a parameter if its moments are kept in another form than the saved one.

        Args:
            saved: codec and block size of the loaded state; block size 0 for float32 moments.
            kept: codec and block size of the optimizer.
        """
        forms = _form(*saved), _form(*kept)
        if forms[0] != forms[1]:
            self._counts[forms] += 1

    def forget(self) -> None:
        """Reset the counts."""
        self._counts.clear()

    def log(self) -> None:
        """Log the counts, each message once per process."""
        for (saved, kept), count in self._counts.items():
            tell_once(
                f"zero8: {count} parameter(s) were saved with {saved} and loaded with {kept}, the "
                "optimizer's settings: each moment is within half a code of the saved one; to keep "
                "the saved form, make the optimizer with the settings of the checkpoint"
            )


def _form(codec: Codec | None, block_size: int) -> str:
    if codec is None or not block_size:
        return "float32 moments"
    return f"codec={codec.name!r}, block_size={block_size}"
