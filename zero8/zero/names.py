# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed knows of a parameter that the optimizer is constructed with."""

import sys

from torch import Tensor


def global_shape(p: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, of which ZeRO-3 may have left an empty tensor."""
    return tuple(getattr(p, "ds_shape", p.shape))


def constructing_engine():
    """Return the DeepSpeed engine that is constructing an optimizer, found among the callers."""
    engines = sys.modules.get("deepspeed.runtime.engine")
    frame = sys._getframe() if engines else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, engines.DeepSpeedEngine):
            return caller
        frame = frame.f_back
    return None


def names_in_engine(engine) -> dict[Tensor, str]:
    """Return the names of parameters in the engine that is constructing an optimizer, if one is.

    DeepSpeed's map for debugging, which would be at hand, belongs to the process: an older engine
    empties it when it is collected, on this rank perhaps only.
    """
    return {} if engine is None else engine.param_names
