# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold the parts of sharded parameters, and so have to agree."""

from collections.abc import Iterable

from torch import Tensor


def process_groups(params: Iterable[Tensor]) -> list:
    """Return the groups over which a sum, one after the other, reaches all who share parameters.

    Of one mesh those of its dimensions; of several the group of all ranks, which is None.  Empty if
    no parameter is sharded.
    """
    meshes = {p.device_mesh for p in params if hasattr(p, "device_mesh")}
    if len(meshes) > 1:
        return [None]
    return [group for mesh in meshes for group in mesh.get_all_groups()]
