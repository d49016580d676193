# SPDX-License-Identifier: Apache-2.0
"""Addresses and kinds of many tensors at once, through DLPack."""

import ctypes
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import zero8
from zero8.op import kernel
from zero8.op.kernel import addresses_if_same, described
from zero8.op.structs import MAX_HASHED, TENSOR, WITHOUT_MEMORY

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


def test_described_kinds_are_equal_for_equal_dtypes():
    tensors = list(KINDS.values())
    kinds = described(tensors)["kind"]
    for i, one in enumerate(tensors):
        for j, other in enumerate(tensors):
            assert (kinds[i] == kinds[j]) == (one.dtype == other.dtype)


def test_described_sparse_tensor_is_without_memory_and_others_are_not_affected():
    dense = torch.ones(3)
    records = described([dense, torch.eye(3).to_sparse(), dense])
    assert records["kind"].tolist()[1] == WITHOUT_MEMORY and not records["contiguous"][1]
    assert records["data"][0] == records["data"][2] == dense.data_ptr()


def test_described_numbers_among_tensors_are_zeros():
    tensor = torch.ones(3)
    records = described([17, tensor, 0.5, True])
    assert [record.tolist() for record in records[[0, 2, 3]]] == [(0, 0, 0, 1, 0)] * 3
    assert records["data"][1] == tensor.data_ptr()


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


def test_described_of_nothing_is_empty():
    assert len(described([])) == 0


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


def test_addresses_of_a_tensor_of_no_elements_may_be_none_at_all():
    objects = [torch.empty(0), torch.ones(2)]
    found = addresses_if_same(objects, described(objects), 2)
    assert found.tolist() == [0, objects[1].data_ptr()]


def unknown_api():
    """Return an interface of a later major version, which may have other fields."""
    table = (ctypes.c_uint64 * 8)(2)  # major version 2, and null in place of all functions
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p] + [ctypes.c_void_p],
    )
    return table, capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)


@pytest.mark.parametrize("is_there", [True, False], ids=["unknown", "missing"])
def test_step_with_an_unknown_interface_of_torch_raises_and_names_its_version(
    is_there, monkeypatch
):
    p = torch.nn.Parameter(torch.ones(64, 70))
    optimizer = zero8.Adam8bitBlockwise([p], lr=1e-2)
    p.grad = torch.ones_like(p)
    table, later = unknown_api()
    if is_there:
        monkeypatch.setattr(Tensor, API, later)
    else:
        monkeypatch.delattr(Tensor, API)
    version = re.escape(torch.__version__)
    with pytest.raises(RuntimeError, match=f"^got torch {version}, .*expected one from 2.11 to be"):
        optimizer.step()
    assert table[0] == 2 and (p == 1).all()


def test_describe_with_too_few_records_raises():
    with pytest.raises(ValueError, match="another number of records than of objects"):
        kernel.module().describe(getattr(Tensor, API), Tensor, [torch.ones(1)], np.empty(0, TENSOR))
