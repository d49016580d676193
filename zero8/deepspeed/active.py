# SPDX-License-Identifier: Apache-2.0
"""`assert_active`: checks that an engine steps with an optimizer of zero8."""

from typing import Any

from zero8.deepspeed.claims import SETTING, in_config
from zero8.deepspeed.constructing import unsupported_mode
from zero8.deepspeed.seam import is_ours
from zero8.environment.agree import gathered


def assert_active(engine: Any) -> None:
    """Raise on all ranks unless a DeepSpeed engine steps with an optimizer of zero8.

    All ranks must call it: it is a collective.

    Args:
        engine: the result of `deepspeed.initialize` or of Accelerate's `prepare`.

    Raises:
        RuntimeError: naming the engine's optimizer, and the setting to change.
    """
    found = gathered(_problem(engine))
    if any(found):
        problem = next(filter(None, found))
        ranks = [rank for rank, text in enumerate(found) if text == problem]
        where = "" if len(ranks) == len(found) else f" (ranks {ranks} of {len(found)})"
        raise RuntimeError(f"{problem}{where}")


def _problem(engine) -> str | None:
    """Return why the engine does not step with an optimizer of zero8, None if it does."""
    if not hasattr(engine, "client_optimizer"):
        return f"assert_active: got a {type(engine).__name__}, expected a DeepSpeed engine"
    optimizer = innermost(engine.optimizer)
    if is_ours(optimizer):
        reason = unsupported_mode(engine._config.zero_config)
        return reason and f"{type(optimizer).__name__} does not work with this engine: {reason}"
    name, config_type = type(optimizer).__name__, engine._config.optimizer_name
    if engine.client_optimizer is not None:
        why = "it was given to deepspeed.initialize, by your script or by a trainer: " + (
            "under offload Accelerate replaces optimizer objects unless the DeepSpeed config says "
            f"{SETTING}"
            if engine.zero_force_ds_cpu_optimizer()
            else f"set {in_config()} in the DeepSpeed config, and make no optimizer object"
        )
    elif config_type is not None:
        why = f'the DeepSpeed config says "type": "{config_type}"; set {in_config()}'
    else:
        name, why = "no optimizer", f"the DeepSpeed config has none; set {in_config()}"
    return f"the engine steps with {name}, not with an optimizer of zero8: {why}"


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of ZeRO, Accelerate and Lightning.

    Lightning's wrapper is an instance of the wrapped class, too; so this does not test the class.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
