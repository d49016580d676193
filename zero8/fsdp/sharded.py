# SPDX-License-Identifier: Apache-2.0
"""The kind of state of a DTensor, such as a parameter of FSDP2.

The entries are a whole parameter's (`zero8.state.plain`), as DTensors with the parameter's mesh and
placements; scales of narrow rows are plain tensors of this rank's groups.
"""

from torch import Tensor

from zero8.environment.numbers import Group
from zero8.fsdp.meshes import shard_groups
from zero8.state.extent import Extent, local
from zero8.state.kind import Contents
from zero8.state.params import ParamInfo
from zero8.state.table import Piece
from zero8.state.whole import WholeTensor


class ShardedTensor(WholeTensor):
    """The state of a DTensor; unless a boundary cuts a block, bits do not depend on world size."""

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
        """See `StateKind`.

        Raises:
            ValueError: if several dimensions of the mesh cut it.
        """
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
