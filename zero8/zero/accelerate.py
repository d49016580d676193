# SPDX-License-Identifier: Apache-2.0
"""Keeps Hugging Face Accelerate from silently replacing the optimizer.

With offload, Accelerate replaces any optimizer object by DeepSpeedCPUAdam before DeepSpeed sees it:
float32 moments, Adam's L2 decay instead of AdamW's, default betas and eps.
"""

import functools
import logging
from dataclasses import dataclass
from types import ModuleType

from zero8.zero.claims import in_config

logger = logging.getLogger("zero8")

REPLACES = "map_pytorch_optim_to_deepspeed"
"""The function of accelerate.accelerator that replaces optimizers."""

UNKNOWN = (
    "cannot tell whether this Accelerate replaces optimizers under offload: "
    "call zero8.assert_active(engine)"
)
SETTING = '"zero_force_ds_cpu_optimizer": false'


def remedy(optimizer: object) -> str:
    """Return how to make DeepSpeed take an optimizer under offload."""
    return (
        f"set {SETTING} at the top level of the DeepSpeed config, or name the optimizer there: "
        f"{in_config(type(optimizer).__name__)} (and give Accelerate a DummyOptim)"
    )


@dataclass(frozen=True)
class Guard:
    """Calls `guard` when Accelerate has been imported."""

    optimizer_class: type

    def __call__(self, accelerator: ModuleType) -> None:
        """Call `guard`."""
        guard(accelerator, self.optimizer_class)


def guard(accelerator: ModuleType, optimizer_class: type) -> None:
    """Have `accelerate.accelerator` raise, with the remedy, instead of replacing our optimizer."""
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
                f"Accelerate would replace {type(optimizer).__name__} by DeepSpeedCPUAdam, as it "
                f"does with every optimizer object under offload; {remedy(optimizer)}"
            )
        return original(optimizer)

    mapped.zero8_guards = (*getattr(original, "zero8_guards", ()), optimizer_class)
    setattr(accelerator, REPLACES, mapped)
