# SPDX-License-Identifier: Apache-2.0
"""The process groups of sharded tensors: whose ranks have to agree, and whose parts differ."""

from collections.abc import Iterable

from torch import Tensor

from zero8.environment.numbers import Group
from zero8.state.extent import local_grad


def is_flattened(p: Tensor) -> bool:
    """Return whether FSDP1 has flattened a parameter."""
    return getattr(p, "_fsdp_flattened", False)


def process_groups(params: Iterable[Tensor]) -> list[Group]:
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


def parts_of_grads(params: Iterable[Tensor]) -> dict[tuple[Group, ...], list[Tensor]]:
    """Return this rank's parts of gradients, by the groups over whose ranks they are sharded.

    A rank without gradients has the same groups, as sums over them are collectives.  Raises as
    `shard_groups`.
    """
    parts: dict[tuple[Group, ...], list[Tensor]] = {}
    for p in params:
        grads = parts.setdefault(shard_groups(p), [])
        if p.grad is not None:
            grads.append(local_grad(p, p.grad))
    return parts


def shard_groups(p: Tensor) -> tuple[Group, ...]:
    """Return the groups over whose ranks a parameter is sharded.

    Raises ValueError if FSDP1 has flattened it.
    """
    if is_flattened(p):
        raise ValueError(
            "got a parameter that FSDP1 has flattened, whose norm only the model knows; call its "
            "clip_grad_norm_(max_norm) instead of the optimizer's"
        )
    if not hasattr(p, "device_mesh"):
        return ()
    # At the top of the file, it would make `import zero8` slower.
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return tuple(
        p.device_mesh.get_group(dim)
        for dim, placement in enumerate(p.placements)
        if isinstance(placement, Shard | _StridedShard)
    )
