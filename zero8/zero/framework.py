# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, as the optimizer sees it."""

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zero8.frameworks import Framework, Use
from zero8.zero import claims, seams
from zero8.zero.flat_state import FlatPartition


class DeepSpeed(Framework):
    """ZeRO 1 to 3, with states on GPUs, in host memory and on NVMe."""

    kinds = (FlatPartition,)

    def fit(self, optimizer_class: type) -> None:
        """See `Framework`."""
        seams.fit_in(optimizer_class)

    def constructing_engine(self) -> object | None:
        """Return the engine that is making the optimizer, found among the callers."""
        engines = sys.modules.get("deepspeed.runtime.engine")
        frame = sys._getframe() if engines else None
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, engines.DeepSpeedEngine):
                return caller
            frame = frame.f_back
        return None

    def names_in(self, engine) -> Mapping[Tensor, str]:
        """Return the names of parameters in an engine.

        DeepSpeed's map for debugging, which would be at hand, belongs to the process: an older
        engine empties it when it is collected, on this rank perhaps only.
        """
        return engine.param_names

    def global_shape(self, p: Tensor) -> tuple[int, ...] | None:
        """Return the shape of a parameter of which ZeRO-3 has left an empty tensor."""
        shape = getattr(p, "ds_shape", None)
        return None if shape is None else tuple(shape)

    def claim(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
        """See `Framework`."""
        claims.lay(optimizer, params, use)
