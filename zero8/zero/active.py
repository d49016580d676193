# SPDX-License-Identifier: Apache-2.0
"""Tells whether an engine really steps with the optimizer that was asked for."""

from typing import Any

from zero8.blockwise import BlockwiseOptimizer
from zero8.ranks.agree import gathered
from zero8.zero.accelerate import SETTING
from zero8.zero.claims import IN_CONFIG
from zero8.zero.modes import unsupported_mode


def assert_active(engine: Any) -> None:
    """Raise on all ranks alike if a DeepSpeed engine does not step with an optimizer of zero8.

    All ranks must call it: they exchange what they found.

    Args:
        engine: what `deepspeed.initialize` or Accelerate's `prepare` made of the model.

    Raises:
        RuntimeError: naming what the engine steps with, and the setting to change.
    """
    found = gathered(_problem(engine))
    if any(found):
        problem = next(filter(None, found))
        ranks = [rank for rank, text in enumerate(found) if text == problem]
        where = "" if len(ranks) == len(found) else f" (ranks {ranks} of {len(found)})"
        raise RuntimeError(f"{problem}{where}")


def _problem(engine) -> str | None:
    """Return what keeps the engine from stepping with ours, None if nothing does."""
    if not hasattr(engine, "client_optimizer"):
        return f"assert_active: got a {type(engine).__name__}, expected a DeepSpeed engine"
    optimizer = innermost(engine.optimizer)
    if isinstance(optimizer, BlockwiseOptimizer):
        reason = unsupported_mode(engine._config.zero_config)
        return (
            reason
            and f"{type(optimizer).__name__} does not take the steps of this engine: {reason}"
        )
    name, config_type = type(optimizer).__name__, engine._config.optimizer_name
    if engine.client_optimizer is not None:
        why = "it was given to deepspeed.initialize, by your script or by a trainer: " + (
            "under offload Accelerate replaces optimizer objects unless the DeepSpeed config says "
            f"{SETTING}"
            if engine.zero_force_ds_cpu_optimizer()
            else f"set {IN_CONFIG} in the DeepSpeed config, and make no optimizer object"
        )
    elif config_type is not None:
        why = f'the DeepSpeed config says "type": "{config_type}"; set {IN_CONFIG}'
    else:
        name, why = "no optimizer", f"the DeepSpeed config has none; set {IN_CONFIG}"
    return f"the engine steps with {name}, not with an optimizer of zero8: {why}"


def innermost(optimizer):
    """Return the optimizer inside the wrappers of ZeRO, Accelerate and Lightning.

    Lightning's are instances of its class, too, with attributes of their own.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
