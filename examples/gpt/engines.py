# SPDX-License-Identifier: Apache-2.0
"""The engines by name."""

from examples.gpt.engine import DEEPSPEED, Engine


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine; here alone is its framework imported."""
    if name == DEEPSPEED:
        from examples.gpt.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine
    from examples.gpt.engine_fsdp2 import FSDP2Engine

    return FSDP2Engine
