# SPDX-License-Identifier: Apache-2.0
"""Warnings that are logged once per process."""

import logging
from functools import cache

from zero8.environment import ranks
from zero8.spec.codec import Codec

logger = logging.getLogger("zero8")

Form = tuple[Codec | None, int]
"""How moments are kept: codec and block size, which is 0 for float32 moments."""


@cache
def tell_once(message: str) -> None:
    """Log a warning, unless it has been logged before."""
    logger.warning(message)


def tell_of_reencoding(saved: Form, kept: Form) -> None:
    """Say on rank 0 that a load has encoded moments in another form than the saved one."""
    forms = _words(*saved), _words(*kept)
    if forms[0] != forms[1] and ranks.rank() == 0:
        tell_once(
            f"zero8: moments were saved with {forms[0]} and loaded with {forms[1]}, the "
            "optimizer's settings: each is within half a code of the saved one; to keep the saved "
            "form, make the optimizer with the settings of the checkpoint"
        )


def _words(codec: Codec | None, block_size: int) -> str:
    if codec is None or not block_size:
        return "float32 moments"
    return f"codec={codec.name!r}, block_size={block_size}"
