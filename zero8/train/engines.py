# SPDX-License-Identifier: Apache-2.0
"""The engines by name."""

from zero8.train.engine import DEEPSPEED, Engine


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine; here alone is its framework imported."""
    if name == DEEPSPEED:
        from zero8.train.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine
    from zero8.train.engine_fsdp2 import FSDP2Engine

    return FSDP2Engine
