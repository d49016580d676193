# SPDX-License-Identifier: Apache-2.0
"""Warnings that are logged once per process."""

import logging
from functools import cache

logger = logging.getLogger("zero8")


@cache
def tell_once(message: str) -> None:
    """Log a warning, unless it has been logged before."""
    logger.warning(message)
