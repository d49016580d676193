# SPDX-License-Identifier: Apache-2.0
"""Detects that an engine would step parameters with another optimizer than was made for them.

Hugging Face's Trainer drops the optimizer object that it was given when it makes a DeepSpeed
engine, and the engine then steps with AdamW or DeepSpeedCPUAdam.  Accelerate replaces every object
by DeepSpeedCPUAdam under offload.  So each of our optimizers claims its parameters when it is
constructed, and claims outlive it.
"""

import logging
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.deepspeed.seam import is_ours
from zero8.state.params import bears_weak_references

logger = logging.getLogger("zero8")

SETTING = '"zero_force_ds_cpu_optimizer": false'
"""What has DeepSpeed, and Accelerate, take an optimizer object under offload."""


def in_config(name: str = "Adam8bitBlockwise") -> str:
    """Return the part of a DeepSpeed config that names an optimizer."""
    return f'"optimizer": {{"type": "{name}", "params": {{...}}}}'


class Claim:
    """An optimizer's claim on its parameters, which outlives it."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Keep a weak reference to it."""
        self.optimizer, self.class_name = weakref.ref(optimizer), type(optimizer).__name__
        self.is_met = False  # whether it has stepped, or an engine steps with it


_claims = WeakTensorKeyDictionary()


def claim(params: Iterable[Tensor], made: Claim) -> None:
    """Claim parameters, replacing earlier claims."""
    for p in filter(bears_weak_references, params):  # DeepSpeed's engines take no others
        _claims[p] = made


def check(engine, basic_optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if one of ours was made for an engine's parameters, and another will step.

    Not if ours has stepped.  No collective, as ranks have the same claims.
    """
    unmet = []
    for name, p in engine.module.named_parameters():
        made = _claims.get(p)
        if made is None or made.is_met:
            continue
        if made.optimizer() is basic_optimizer:
            made.is_met = True
        else:
            unmet.append((name, made))
    if not unmet:
        return
    ours = unmet[0][1].class_name
    first = f"the {ours} that was made for {unmet[0][0]}"
    if len(unmet) > 1:
        first += f" and {len(unmet) - 1} other parameter(s)"
    stepping = type(basic_optimizer).__name__
    if is_ours(basic_optimizer):
        logger.warning(
            f"zero8: DeepSpeed steps with an {stepping} that it made from its config; {first} and "
            "its settings are not used"
        )
        for _, made in unmet:
            made.is_met = True
        return
    raise ValueError(
        f"DeepSpeed would step with {stepping}, not with {first}. Trainers such as Hugging Face's "
        "drop or replace the optimizer object that they are given when they make an engine: name "
        f"it in the DeepSpeed config instead, {in_config(ours)}, and make none; for Accelerate to "
        f"keep an object under offload, set {SETTING} there. To step with {stepping}, make a new "
        f"model, and no {ours}"
    )
