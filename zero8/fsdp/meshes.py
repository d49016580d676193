# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold the parts of sharded parameters, and so have to agree."""

from collections.abc import Iterable

from torch import Tensor


def process_groups(params: Iterable[Tensor]) -> list:
    """Return the groups over which a sum, one after the other, reaches all who share parameters.

    Of several meshes those of the first that has the ranks of all others: stages of a pipeline, of
    which some have experts on a second mesh, must not wait for one another.  Where there is none,
    the group of all ranks, which is None.  Empty if no parameter is sharded.
    """
    meshes = list(dict.fromkeys(p.device_mesh for p in params if hasattr(p, "device_mesh")))
    ranks = [set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    for mesh, its_ranks in zip(meshes, ranks, strict=True):
        if all(others <= its_ranks for others in ranks):
            return list(mesh.get_all_groups())
    return [None] if meshes else []
