# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, as the optimizer sees it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zero8.frameworks import Framework, Use
from zero8.zero import claims, constructing, seams
from zero8.zero.flat_state import FlatPartition


class DeepSpeed(Framework):
    """ZeRO 1 to 3, with states on GPUs, in host memory and on NVMe."""

    kinds = (FlatPartition,)

    def fit(self, base_class: type, optimizer_class: type) -> None:
        """See `Framework`."""
        seams.fit_in(base_class, optimizer_class)

    def constructing_engine(self) -> object | None:
        """See `Framework`."""
        return constructing.constructing_engine()

    def names_in(self, engine) -> Mapping[Tensor, str]:
        """Return the names of an engine's parameters.

        Not from DeepSpeed's debug map, which is global: the collection of an older engine empties
        it, possibly on this rank alone.
        """
        return engine.param_names

    def global_shape(self, p: Tensor) -> tuple[int, ...] | None:
        """Return the full shape of a parameter that ZeRO-3 has partitioned, else None."""
        shape = getattr(p, "ds_shape", None)
        return None if shape is None else tuple(shape)

    def check_replaced(self, params: Sequence[Tensor]) -> None:
        """See `Framework`; these are the attributes by which ZeRO 3, and 1 and 2, know theirs."""
        if any(hasattr(p, "_z3_optimizer") or hasattr(p, "_hp_mapping") for p in params):
            raise ValueError(
                "add_param_group: got a group for an optimizer of ZeRO, which steps only what it "
                "partitioned in deepspeed.initialize; pass all groups there, those that train "
                "later with an lr of 0, or save a checkpoint and make a new engine"
            )

    def claim(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
        """See `Framework`."""
        claims.claim(optimizer, params, use)
