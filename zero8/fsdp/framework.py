# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FSDP, as the optimizer sees it."""

from collections.abc import Iterable

from torch import Tensor

from zero8.frameworks import Framework
from zero8.fsdp.flattened import FlattenedTensor
from zero8.fsdp.meshes import process_groups, shard_groups
from zero8.fsdp.sharded import ShardedTensor


class Fsdp(Framework):
    """FSDP2, and FSDP1, whose flat parameters keep float32 moments."""

    kinds = (ShardedTensor, FlattenedTensor)

    def process_groups(self, params: Iterable[Tensor]) -> list:
        """See `Framework`."""
        return process_groups(params)

    def shard_groups(self, p: Tensor) -> tuple:
        """See `Framework`."""
        return shard_groups(p)
