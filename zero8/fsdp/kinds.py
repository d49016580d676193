# SPDX-License-Identifier: Apache-2.0
"""The kinds of state of FSDP2's DTensors and of FSDP1's flattened parameters."""

from torch import Tensor

from zero8.environment.numbers import Group
from zero8.fsdp.meshes import is_flattened, shard_groups
from zero8.state.extent import Extent, local
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

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        return hasattr(p, "device_mesh")

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        self._extent(p, self._parameter(info))
        if self.algorithm.is_of_matrices:
            self.process_group(p)

    def process_group(self, p: Tensor) -> Group:
        """See `StateKind`; raises ValueError if several dimensions of the mesh cut it."""
        groups = shard_groups(p)
        if len(groups) > 1:
            raise ValueError(
                f"got a matrix sharded as {p.placements}, over {len(groups)} dimensions of the "
                "mesh; Muon8bitBlockwise supports one (and replicas)"
            )
        return groups[0] if groups else None

    def contents(self, state: dict) -> Contents:
        """See `StateKind`."""
        return tuple(state), list(map(local, state.values()))

    def _extent(self, p: Tensor, parameter: Piece) -> Extent:
        # At the top of the file, it would make `import zero8` a third slower.
        from zero8.fsdp.placed import PlacedExtent

        extent = PlacedExtent.of(p, parameter.name)
        extent.check_blocks(parameter)
        return extent


class FlattenedTensor(WholeTensor):
    """The state of a parameter of FSDP1, with or without `use_orig_params`.

    It has no block grid, so its moments stay float32.  FSDP1 saves only tensors of the parameter's
    shape and dtype, so checkpoints have the states of torch's AdamW.
    """

    raises_alone = False  # gradients differ between ranks, which wait for each other in collectives
    remark = ", flattened by FSDP1"

    def serves(self, p: Tensor, state: dict) -> bool:
        """See `StateKind`."""
        return is_flattened(p)

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """See `StateKind`."""
        tell_once(
            "zero8: parameters that FSDP1 has flattened keep float32 moments, 8 bytes per element; "
            "FSDP2 (torch.distributed.fsdp.fully_shard) allows 8-bit moments, 2.05 bytes"
        )

    def saved(self, p: Tensor, state: dict, info: ParamInfo | None, in_fp32: bool) -> dict:
        """See `StateKind`."""
        return super().saved(p, state, info, in_fp32=True)
