# SPDX-License-Identifier: Apache-2.0
"""The frameworks that zero8 supports."""

from functools import cache

from zero8 import frameworks
from zero8.fsdp.framework import Fsdp
from zero8.zero.framework import DeepSpeed


@cache
def register() -> None:
    """Register all of them; idempotent."""
    for framework in (Fsdp(), DeepSpeed()):
        frameworks.register(framework)
