# SPDX-License-Identifier: Apache-2.0
"""Notices that an engine would step parameters with another optimizer than was made for them.

Hugging Face's Trainer drops the optimizer object that it was given when it makes a DeepSpeed
engine, and the engine then steps with AdamW or DeepSpeedCPUAdam.  So each optimizer claims its
parameters when it is made, and claims outlive it.
"""

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.frameworks import Use
from zero8.state.params import bears_weak_references

logger = logging.getLogger("zero8")

IN_CONFIG = '"optimizer": {"type": "Adam8bitBlockwise", "params": {...}}'


@dataclass(frozen=True)
class Claim:
    """That an optimizer was made for a parameter.

    Attributes:
        optimizer: a weak reference to it.
        use: whether anything steps with it.
    """

    optimizer: weakref.ref
    use: Use


_claims = WeakTensorKeyDictionary()


def lay(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
    """Claim parameters for an optimizer; the last one that was made for a parameter has it."""
    claim = Claim(weakref.ref(optimizer), use)
    for p in filter(bears_weak_references, params):  # no engine of DeepSpeed's takes others
        _claims[p] = claim


def check(engine, basic_optimizer: torch.optim.Optimizer, optimizer_class: type) -> None:
    """Look at the claims on an engine's parameters; no collective, as ranks have the same claims.

    Args:
        engine: DeepSpeed's, under construction.
        basic_optimizer: what it will step with.
        optimizer_class: ours.

    Raises:
        ValueError: if one of ours was made for them that has never stepped, and another will.
    """
    unmet = []
    for name, p in engine.module.named_parameters():
        claim = _claims.get(p)
        if claim is None or claim.use.is_met:
            continue
        if claim.optimizer() is basic_optimizer:
            claim.use.is_met = True
        else:
            unmet.append((name, claim))
    if not unmet:
        return
    first = f"the {optimizer_class.__name__} that was made for {unmet[0][0]}"
    if len(unmet) > 1:
        first += f" and {len(unmet) - 1} other parameter(s)"
    if isinstance(basic_optimizer, optimizer_class):
        logger.warning(
            "zero8: DeepSpeed steps with an %s that it made from its config; %s is not used, nor "
            "are its settings",
            type(basic_optimizer).__name__,
            first,
        )
        for _, claim in unmet:
            claim.use.is_met = True
        return
    raise ValueError(
        f"DeepSpeed would step with {type(basic_optimizer).__name__}, not with {first}. Trainers "
        "such as Hugging Face's drop the optimizer object that they are given when they make an "
        f"engine: name it in the DeepSpeed config instead, {IN_CONFIG}, and make none. To step "
        f"with {type(basic_optimizer).__name__}, make a new model, and no "
        f"{optimizer_class.__name__}"
    )
