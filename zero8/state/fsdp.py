# SPDX-License-Identifier: Apache-2.0
"""PyTorch's FSDP: the kinds of state of FSDP2's DTensors and FSDP1's flat parameters, and ranks."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zero8.environment.ranks import Group
from zero8.state.extent import Extent, local, local_grad
from zero8.state.header import Entries
from zero8.state.kind import Contents
from zero8.state.params import ParamInfo
from zero8.state.table import Piece
from zero8.state.tell import tell_once
from zero8.state.whole import WholeTensor


class ShardedTensor(WholeTensor):
    """The state of a DTensor; unless a boundary cuts a block, bits do not depend on world size.

    The entries are a whole parameter's (`zero8.state.plain`), as DTensors with the parameter's mesh
    and placements; scales of narrow rows are plain tensors of this rank's groups.
    """

    raises_alone = False  # gradients differ between ranks, which wait for each other in collectives
    wraps_tensors = True

    def serves(self, p: Tensor, state: Entries) -> bool:
        """See `StateKind`."""
        return hasattr(p, "device_mesh")

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        self._extent(p, self._parameter(info))
        if self.algorithm.is_of_matrices:
            self.process_group(p)

    def process_group(self, p: Any) -> Group:
        """See `StateKind`; raises ValueError if several dimensions of the mesh cut it."""
        groups = shard_groups(p)
        if len(groups) > 1:
            raise ValueError(
                f"got a matrix sharded as {p.placements}, over {len(groups)} dimensions of the "
                "mesh; Muon8bitBlockwise supports one (and replicas)"
            )
        return groups[0] if groups else None

    def contents(self, state: Entries) -> Contents:
        """See `StateKind`."""
        return tuple(state), list(map(local, state.values()))

    def _extent(self, p: Tensor, parameter: Piece) -> Extent:
        # At the top of the file, it would make `import zero8` a third slower.
        from zero8.state.placed import PlacedExtent

        extent = PlacedExtent.of(p, parameter.name)
        extent.check_blocks(parameter)
        return extent


class FlattenedTensor(WholeTensor):
    """The state of a parameter of FSDP1, with or without `use_orig_params`.

    It has no block grid, so its moments stay float32.  FSDP1 saves only tensors of the parameter's
    shape and dtype, so checkpoints have the states of torch's AdamW.
    """

    raises_alone = False  # gradients differ between ranks, which wait for each other in collectives

    def serves(self, p: Tensor, state: Entries) -> bool:
        """See `StateKind`."""
        return is_flattened(p)

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        tell_once(
            "zero8: parameters that FSDP1 has flattened keep float32 moments, 8 bytes per element; "
            "FSDP2 (torch.distributed.fsdp.fully_shard) allows 8-bit moments, 2.05 bytes"
        )

    def saved(self, p: Tensor, state: Entries, info: ParamInfo | None, in_fp32: bool) -> Entries:
        """See `StateKind`."""
        return super().saved(p, state, info, in_fp32=True)


# --- Whose ranks have to agree, and whose parts differ ------------------------------------------


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


def shard_groups(p: Any) -> tuple[Group, ...]:
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
