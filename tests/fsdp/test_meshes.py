# SPDX-License-Identifier: Apache-2.0
"""Which ranks agree: those of the parameters' meshes, whatever else other ranks hold."""

from types import SimpleNamespace

import pytest
import torch

from zero8.state.fsdp import process_groups


class Mesh:
    """Stands for a DeviceMesh whose groups have names."""

    def __init__(self, ranks, *groups):
        self.mesh, self._groups = torch.tensor(ranks), groups

    def get_all_groups(self):
        return list(self._groups)


DENSE = Mesh([0, 1, 2, 3], "data")
EXPERTS = Mesh([[0, 1], [2, 3]], "expert", "within")
HALF = Mesh([0, 1], "half")
OTHER = Mesh([2, 3], "other")


@pytest.mark.parametrize(
    ("meshes", "expected"),
    [
        ([], []),
        ([DENSE], ["data"]),
        ([EXPERTS], ["expert", "within"]),
        ([DENSE, EXPERTS, DENSE], ["data"]),  # a stage with experts, beside one without
        ([HALF, DENSE], ["data"]),
        ([HALF, OTHER], [None]),  # no mesh has all of these
    ],
)
def test_process_groups_are_those_of_the_mesh_that_has_all_ranks(meshes, expected):
    params = [SimpleNamespace(), *(SimpleNamespace(device_mesh=mesh) for mesh in meshes)]
    assert process_groups(params) == expected
