# SPDX-License-Identifier: Apache-2.0
"""The process groups of sharded tensors: whose ranks have to agree, and whose parts differ."""

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def process_groups(params: Iterable[Tensor]) -> list:
    """Return groups; all_reduces over them in turn reach all ranks that share parameters.

    With several meshes, they are the groups of the first mesh that includes the ranks of all
    others, because stages of a pipeline, some of which have experts on a second mesh, must not wait
    for each other.  If no mesh does, it is the group of all ranks, None.  Empty if no parameter is
    sharded.
    """
    meshes = list(dict.fromkeys(p.device_mesh for p in params if hasattr(p, "device_mesh")))
    ranks = [set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    for mesh, its_ranks in zip(meshes, ranks, strict=True):
        if all(others <= its_ranks for others in ranks):
            return list(mesh.get_all_groups())
    return [None] if meshes else []


def shard_groups(t: DTensor) -> tuple:
    """Return the groups over whose ranks a tensor is sharded.

    Raises:
        ValueError: if it is neither sharded nor replicated along a dimension of its mesh.
    """
    groups = []
    for dim, placement in enumerate(t.placements):
        if isinstance(placement, Shard | _StridedShard):
            groups.append(t.device_mesh.get_group(dim))
        elif not placement.is_replicate():
            raise ValueError(f"got placement {placement}, expected Shard or Replicate")
    return tuple(groups)
