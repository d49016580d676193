# SPDX-License-Identifier: Apache-2.0
"""The part of a DTensor on this rank, and the entries of its state, which are DTensors, too.

The entries have the mesh and the placements of the parameter, so that
`torch.distributed.checkpoint` saves and reshards them like parameters.  For scales this requires
that no boundary between ranks falls inside a block: `check_blocks`.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zero8.spec.grid import is_narrow
from zero8.state.extent import Box, Extent
from zero8.state.table import Piece

Cut = tuple[Any, int]
"""A placement that shards a dimension, and the number of parts."""


@dataclass(frozen=True)
class PlacedExtent(Extent):
    """This rank's box of a parameter, with the parameter's mesh and placements."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, p: Any, name: str) -> "PlacedExtent":
        """Return the extent of the parameter called `name`.

        Raises ValueError, on all ranks, if the part of one of them is not a box of the parameter.
        """
        ranges = []
        for dim, size in enumerate(p.shape):
            cuts, sizes = _cuts(p.placements, p.device_mesh, dim)
            coordinate = p.device_mesh.get_coordinate()
            ranks = itertools.product(*map(range, sizes.values()))
            is_strided = any(isinstance(placement, _StridedShard) for placement, _ in cuts)
            if is_strided and not all(_held(size, cuts, at) for at in ranks):
                raise ValueError(
                    f"{name}: got shape {tuple(p.shape)} sharded as {p.placements}, which gives a "
                    "rank rows that are not consecutive; expected consecutive rows, as in FSDP2"
                )
            ranges.append(_held(size, cuts, tuple(coordinate[mesh_dim] for mesh_dim in sizes)))
        offset, local_shape = zip(*ranges, strict=True) if ranges else ((), ())
        return cls(tuple(p.shape), local_shape, offset, p.device_mesh, tuple(p.placements))

    def check_blocks(self, parameter: Piece) -> None:
        """Raise ValueError unless the blocks of every rank are blocks of the whole parameter.

        Groups of narrow rows are exempt: see `zero8.state.narrow`.
        """
        if not parameter.is_quantized:
            return
        scale_shape = parameter.grid.scale_shape(self.shape)
        row = range(len(scale_shape) - 1, len(self.shape))  # the dimensions of a row
        if not all(self._keeps_blocks(parameter, scale_shape, dim) for dim in row):
            raise ValueError(
                f"{parameter.name}: got shape {self.shape} sharded as {self.placements}, which "
                f"cuts blocks of {parameter.block_size} elements, expected parts of rows that "
                "are multiples of it; set a smaller block_size, or keep float32 moments of "
                f"this parameter: fp32_params=[{parameter.name!r}]"
            )

    def _keeps_blocks(self, parameter: Piece, scale_shape: tuple[int, ...], dim: int) -> bool:
        """Return whether the cuts through a dimension of rows fall between blocks."""
        cuts, sizes = _cuts(self.placements, self.mesh, dim)
        row = len(scale_shape) - 1
        if not cuts:
            return True
        if dim > row or is_narrow(self.shape):
            return False
        in_row = math.prod(self.shape[row + 1 :])
        for at in itertools.product(*map(range, sizes.values())):
            begin, size = (n * in_row for n in _held(self.shape[dim], cuts, at) or ())
            block, rest = divmod(begin, parameter.block_size)
            blocks = block, -(-size // parameter.block_size)
            if size and (rest or blocks != _held(scale_shape[row], cuts, at)):
                return False
        return True

    def entry(self, local: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
        """See `Extent`."""
        local = super().entry(local, shape, box)
        like = torch.empty(shape, device="meta")
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        # from_local would move offloaded tensors from the CPU to the mesh's device.
        return DTensor(local, DTensorSpec(self.mesh, self.placements, meta), requires_grad=False)

    def has_form(self, value: Tensor) -> bool:
        """See `Extent`."""
        place = getattr(value, "device_mesh", None), getattr(value, "placements", None)
        return tuple(value.shape) == self.shape and place == (self.mesh, self.placements)

    def part_of(self, name: str, saved: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
        """See `Extent`; a plain tensor of the shape of this rank's part is that part."""
        is_part = tuple(saved.shape) == (*box[0], *shape[len(box[0]) :])
        if is_part and not isinstance(saved, DTensor):
            return saved
        if tuple(saved.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(saved.shape)}, expected {shape}")
        if not isinstance(saved, DTensor):
            return saved[tuple(slice(at, at + size) for size, at in zip(*box, strict=True))]
        if (saved.device_mesh, tuple(saved.placements)) != (self.mesh, self.placements):
            raise ValueError(
                f"{name}: got a tensor sharded as {saved.placements} on {saved.device_mesh}, "
                f"expected {self.placements} on {self.mesh}, as the parameter is; load it with "
                "torch.distributed.checkpoint, which reshards"
            )
        return saved.to_local()


def _cuts(
    placements: Sequence[Placement], mesh: DeviceMesh, dim: int
) -> tuple[tuple[Cut, ...], dict[int, int]]:
    """Return the cuts through a dimension, and the sizes of the mesh dimensions that make them."""
    sizes = {
        mesh_dim: mesh.size(mesh_dim)
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    }
    return tuple((placements[mesh_dim], size) for mesh_dim, size in sizes.items()), sizes


@lru_cache(maxsize=65536)
def _held(size: int, cuts: tuple[Cut, ...], at: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (first index, number) of a rank's range of a dimension, None if it is not a range.

    `at` is the rank's part of each cut through the dimension.
    """
    index = torch.arange(size, device="cpu")
    for (placement, number), place in zip(cuts, at, strict=True):
        index = index.view(*[1] * placement.dim, -1)
        parts, _ = placement._split_tensor(index, number, with_padding=False, contiguous=False)
        index = parts[place].flatten()
    if not len(index):
        return 0, 0
    if int(index[-1]) - int(index[0]) != len(index) - 1:
        return None
    return int(index[0]), len(index)
