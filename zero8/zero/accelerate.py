# SPDX-License-Identifier: Apache-2.0
"""Keeps Hugging Face Accelerate from replacing the optimizer in silence.

With offload, Accelerate exchanges any optimizer object for DeepSpeedCPUAdam before DeepSpeed sees
it: float32 moments, Adam's L2 decay in place of AdamW's, betas and eps of its own.
"""

import functools
import logging
from dataclasses import dataclass
from types import ModuleType

logger = logging.getLogger("zero8")

REPLACES = "map_pytorch_optim_to_deepspeed"
"""The function of accelerate.accelerator that exchanges optimizers."""

UNKNOWN = (
    "cannot tell whether this Accelerate replaces optimizers under offload: "
    "call zero8.assert_active(engine)"
)
SETTING = '"zero_force_ds_cpu_optimizer": false'
REMEDY = (
    f"set {SETTING} at the top level of the DeepSpeed config, or name the optimizer there: "
    '"optimizer": {"type": "Adam8bitBlockwise", "params": {...}} (and give Accelerate a DummyOptim)'
)


@dataclass(frozen=True)
class Guard:
    """Calls `guard` when Accelerate has been imported."""

    optimizer_class: type

    def __call__(self, accelerator: ModuleType) -> None:
        """Guard our optimizer from it."""
        guard(accelerator, self.optimizer_class)


def guard(accelerator: ModuleType, optimizer_class: type) -> None:
    """Have `accelerate.accelerator` refuse, with the remedy, to replace our optimizer."""
    original = getattr(accelerator, REPLACES, None)
    if original is None:
        logger.warning(UNKNOWN)
        return
    if optimizer_class in getattr(original, "zero8_guards", ()):
        return

    @functools.wraps(original)
    def mapped(optimizer):
        if isinstance(optimizer, optimizer_class):
            raise ValueError(
                "Accelerate would train with DeepSpeedCPUAdam in place of Adam8bitBlockwise, as "
                f"it does with every optimizer object under offload; {REMEDY}"
            )
        return original(optimizer)

    mapped.zero8_guards = (*getattr(original, "zero8_guards", ()), optimizer_class)
    setattr(accelerator, REPLACES, mapped)
