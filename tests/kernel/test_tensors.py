# SPDX-License-Identifier: Apache-2.0
"""Addresses and kinds of many tensors at once, through DLPack and without it."""

import ctypes

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


def without_dlpack(tensors):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Tensor, API)
        return described(tensors)


@pytest.mark.parametrize("name", KINDS)
def test_described_tensor_is_what_torch_says_of_it(name):
    tensor = KINDS[name]
    for records in (described([tensor]), without_dlpack([tensor])):
        data, numel, kind, contiguous, _ = records[0].tolist()
        assert (data, numel) == (tensor.data_ptr(), tensor.numel())
        assert bool(contiguous) is tensor.is_contiguous()
        assert kind != WITHOUT_MEMORY


@pytest.mark.parametrize("describe", [described, without_dlpack])
def test_described_kinds_are_equal_for_equal_dtypes(describe):
    tensors = list(KINDS.values())
    kinds = describe(tensors)["kind"]
    for i, one in enumerate(tensors):
        for j, other in enumerate(tensors):
            assert (kinds[i] == kinds[j]) == (one.dtype == other.dtype)


@pytest.mark.parametrize("describe", [described, without_dlpack])
def test_described_sparse_tensor_is_without_memory_and_others_are_not_affected(describe):
    dense = torch.ones(3)
    records = describe([dense, torch.eye(3).to_sparse(), dense])
    assert records["kind"].tolist()[1] == WITHOUT_MEMORY and not records["contiguous"][1]
    assert records["data"][0] == records["data"][2] == dense.data_ptr()


@pytest.mark.parametrize("describe", [described, without_dlpack])
def test_described_numbers_among_tensors_are_zeros(describe):
    tensor = torch.ones(3)
    records = describe([17, tensor, 0.5, True])
    assert [record.tolist() for record in records[[0, 2, 3]]] == [(0, 0, 0, 1, 0)] * 3
    assert records["data"][1] == tensor.data_ptr()


DESCRIPTION = torch.arange(8)


@pytest.mark.parametrize("describe", [described, without_dlpack])
def test_described_contents_tell_small_descriptions_apart_and_nothing_else(describe):
    changed = DESCRIPTION.clone()
    changed[7] += 1
    same, other = DESCRIPTION.clone(), DESCRIPTION.flip(0)
    of = describe([DESCRIPTION, same, other, changed, DESCRIPTION[:7]])["contents"].tolist()
    assert of[0] == of[1] and len(set(of)) == 4
    others = [
        DESCRIPTION.int(),
        DESCRIPTION.double(),
        DESCRIPTION.byte(),
        DESCRIPTION.repeat(2)[::2],
        torch.ones(MAX_HASHED + 1, dtype=torch.int64),
        torch.ones(3, dtype=torch.int64, device="meta"),
    ]
    assert not describe(others)["contents"].any()
    longest = torch.ones(MAX_HASHED, dtype=torch.int64)
    assert describe([longest])["contents"].all()


def test_described_of_nothing_is_empty():
    assert len(described([])) == 0


def again_without_dlpack(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Tensor, API)
        return addresses_if_same(*args)


def moved_state(objects):
    objects[2] = objects[2].clone()


def changed_description(objects):
    objects[3][5] += 1


def grown(objects):
    objects.append(torch.ones(1))


def another_dtype(objects):
    objects[0].data = objects[0].data.double()


def another_size(objects):
    objects[0].data = objects[0].data[:2]


def another_order(objects):
    objects[1].data = objects[1].data.t().contiguous().t()


def without_memory(objects):
    objects[1].untyped_storage().resize_(0)


CHANGES = [
    moved_state, changed_description, grown, another_dtype, another_size, another_order,
    without_memory,
]  # fmt: skip


@pytest.mark.parametrize(
    "look", [(described, addresses_if_same), (without_dlpack, again_without_dlpack)]
)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_addresses_of_objects_that_have_changed_are_none(change, look):
    describe, again = look
    objects = [torch.ones(3, 2), torch.ones(4, 5), torch.ones(6), torch.arange(8), 17]
    before = describe(objects)
    objects[0], objects[1] = objects[0].clone(), objects[1].clone()
    found = again(objects, before, 2)
    assert found.tolist() == [objects[0].data_ptr(), objects[1].data_ptr()]
    change(objects)
    assert again(objects, before, 2) is None


@pytest.mark.parametrize("again", [addresses_if_same, again_without_dlpack])
def test_addresses_of_a_tensor_of_no_elements_may_be_none_at_all(again):
    objects = [torch.empty(0), torch.ones(2)]
    before = described(objects) if again is addresses_if_same else without_dlpack(objects)
    assert again(objects, before, 2).tolist() == [0, objects[1].data_ptr()]


def test_described_with_an_unknown_version_of_dlpack_asks_torch(monkeypatch):
    """An interface of a later major version may have other fields: it must not be called."""
    table = (ctypes.c_uint64 * 8)(2)  # major version 2, and null in place of all functions
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p] + [ctypes.c_void_p],
    )
    later = capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
    monkeypatch.setattr(Tensor, API, later)
    tensor = torch.randn(4, 5).t()
    assert described([tensor]).tolist() == without_dlpack([tensor]).tolist()


def test_describe_with_too_few_records_raises():
    with pytest.raises(ValueError, match="another number of records than of objects"):
        kernel.module().describe(getattr(Tensor, API), Tensor, [torch.ones(1)], np.empty(0, TENSOR))


def test_steps_without_dlpack_have_the_same_bits(monkeypatch):
    def trained():
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 70), (5,), (80, 66))]
        optimizer = zero8.Adam8bitBlockwise(params, lr=1e-2)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            params[2].grad = torch.randn(66, 80).t()
            optimizer.step()
        return params

    through_dlpack = trained()
    monkeypatch.delattr(Tensor, API)
    for p, q in zip(through_dlpack, trained(), strict=True):
        assert torch.equal(p, q)
