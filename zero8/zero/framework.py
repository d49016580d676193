# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO, as the optimizer sees it."""

from collections.abc import Iterable, Mapping

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

    def claim(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
        """See `Framework`."""
        claims.claim(optimizer, params, use)
