# SPDX-License-Identifier: Apache-2.0
"""Addresses and kinds of many tensors at once, through DLPack."""

import re

import pytest
import torch
from torch import Tensor

import zero8
from zero8.op.kernel import addresses_if_same, described
from zero8.op.structs import MAX_HASHED, WITHOUT_MEMORY

API = "__dlpack_c_exchange_api__"
KINDS = {
    "parameter": torch.nn.Parameter(torch.randn(3, 4)),
    "result of a graph": torch.ones(3, requires_grad=True) * 2,
    "transposed": torch.randn(4, 5).t(),
    "row that starts inside": torch.randn(4, 5)[1:],
    "every second": torch.randn(10)[::2],
    "expanded": torch.randn(5).expand(4, 5),
    "strides that do not matter": torch.randn(2, 1, 3).transpose(0, 1),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "no elements": torch.zeros(0, 3),
    "no elements, transposed": torch.zeros(3, 0, 2).transpose(0, 2),
    "one number": torch.tensor(3.0),
    "bfloat16 at an odd element": torch.zeros(7, dtype=torch.bfloat16)[1:],
    "float16": torch.zeros(3, dtype=torch.float16),
    "codes": torch.zeros(3, dtype=torch.uint8),
    "integers": torch.zeros(3, dtype=torch.int64),
}


@pytest.mark.parametrize("name", KINDS)
def test_described_tensor_is_what_torch_says_of_it(name):
    tensor = KINDS[name]
    data, numel, kind, contiguous, _ = described([tensor])[0].tolist()
    assert (data, numel) == (tensor.data_ptr(), tensor.numel())
    assert bool(contiguous) is tensor.is_contiguous()
    assert kind != WITHOUT_MEMORY


DESCRIPTION = torch.arange(8)


def test_described_contents_tell_small_descriptions_apart_and_nothing_else():
    changed = DESCRIPTION.clone()
    changed[7] += 1
    same, other = DESCRIPTION.clone(), DESCRIPTION.flip(0)
    of = described([DESCRIPTION, same, other, changed, DESCRIPTION[:7]])["contents"].tolist()
    assert of[0] == of[1] and len(set(of)) == 4
    others = [
        DESCRIPTION.int(),
        DESCRIPTION.double(),
        DESCRIPTION.byte(),
        DESCRIPTION.repeat(2)[::2],
        torch.ones(MAX_HASHED + 1, dtype=torch.int64),
        torch.ones(3, dtype=torch.int64, device="meta"),
    ]
    assert not described(others)["contents"].any()
    longest = torch.ones(MAX_HASHED, dtype=torch.int64)
    assert described([longest])["contents"].all()


CHANGES = {
    "moved state": lambda of: of.__setitem__(2, of[2].clone()),
    "another description": lambda of: of[3].add_(1),
    "one more": lambda of: of.append(torch.ones(1)),
    "another dtype": lambda of: setattr(of[0], "data", of[0].data.double()),
    "another size": lambda of: setattr(of[0], "data", of[0].data[:2]),
    "another order": lambda of: setattr(of[1], "data", of[1].data.t().contiguous().t()),
    "no memory": lambda of: of[1].untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_addresses_of_objects_that_have_changed_are_none(change):
    objects = [torch.ones(3, 2), torch.ones(4, 5), torch.ones(6), torch.arange(8), 17]
    before = described(objects)
    objects[0], objects[1] = objects[0].clone(), objects[1].clone()
    found = addresses_if_same(objects, before, 2)
    assert found.tolist() == [objects[0].data_ptr(), objects[1].data_ptr()]
    change(objects)
    assert addresses_if_same(objects, before, 2) is None


def test_step_without_the_interface_of_torch_raises_and_names_its_version(monkeypatch):
    p = torch.nn.Parameter(torch.ones(64, 70))
    optimizer = zero8.Adam8bitBlockwise([p], lr=1e-2)
    p.grad = torch.ones_like(p)
    monkeypatch.delattr(Tensor, API)
    version = re.escape(torch.__version__)
    with pytest.raises(RuntimeError, match=f"^got torch {version}, .*expected one from 2.11 to be"):
        optimizer.step()
    assert (p == 1).all()
