# SPDX-License-Identifier: Apache-2.0
"""As test_state_arrival.py, but for states of a ZeRO partition: each is fitted, or refused whole.

test_sanitized.py runs this again with the sanitizers watching.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from moment_samples import MOMENTS, buffers
from mutations import zero_optimizer
from nests import assert_same
from small_optimizers import bytes_of, run

from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def with_store(which, **changes):
    """Return both moments, in the store of one of which something has been replaced."""

    def change(moments):
        store = moments[which].store
        for name, make in changes.items():
            setattr(store, name, make(getattr(store, name)))
        return moments

    return change


def overlapping(moments):
    moments["exp_avg_sq"].store.codes = moments["exp_avg"].store.codes
    return moments


def exchanged(moments):
    return {"exp_avg": moments["exp_avg_sq"], "exp_avg_sq": moments["exp_avg"]}


def moved(moments):
    """Return moments whose first piece begins a row later: as many elements, but others."""
    for moment in moments.values():
        store = moment.store
        first, *others = store.table.pieces
        rows, *row = first.shape
        changes = {"shape": (rows + 1, *row), "first": first.first + math.prod(row)}
        store.table = PieceTable((replace(first, **changes), *others), store.table.numel)
    return moments


def of_one_element_less(moments):
    return {which: MomentTensor(x.store, 0, x.numel() - 1) for which, x in moments.items()}


def other_codec(*which):
    def change(moments):
        for name in which:
            store = moments[name].store
            other = MomentStore.zeros(CODECS["dynamic"], ADAM.moment(name), store.table)
            other.write(0, store.read(0, store.table.numel))
            moments[name] = MomentTensor(other)
        return moments

    return change


def dense(*which, change=lambda values: values):
    return lambda moments: moments | {name: change(moments[name].dense()) for name in which}


def first_of(values):
    return values[:1].expand(values.shape)


def without_storage(values):
    values.untyped_storage().resize_(3)
    return values


def to_meta(values):
    return values.to("meta")


# What changes in the moments; what a load does; what a step after an assignment does: None is
# "fits", else what the refusal says.
CASES = {
    "both dense": (dense(*MOMENTS), None, None),
    "exp_avg dense and expanded": (dense("exp_avg", change=first_of), None, None),
    "exp_avg dense and cut": (dense("exp_avg", change=lambda x: x[:3]), "of 3;", "of 3;"),
    "exp_avg dense on meta": (dense("exp_avg", change=to_meta), "meta", "meta"),
    "exp_avg dense, shrunk": (dense("exp_avg", change=without_storage), "storage", "storage"),
    "exp_avg sparse": (dense("exp_avg", change=torch.Tensor.to_sparse), "layout", "layout"),
    "no exp_avg": (lambda m: {"exp_avg_sq": m["exp_avg_sq"]}, "without", "without"),
    "codes cut": (with_store("exp_avg", codes=lambda t: t[:3]), "exp_avg codes", "exp_avg codes"),
    "roots cut": (with_store("exp_avg_sq", scales=lambda t: t[:, 0]), "sq scales", "sq scales"),
    "codes shrunk": (with_store("exp_avg_sq", codes=without_storage), "storage", "storage"),
    "codes expanded": (with_store("exp_avg", codes=first_of), "strides", "strides"),
    "scales on meta": (with_store("exp_avg", scales=to_meta), "meta", "meta"),
    "overlapping": (overlapping, None, "share memory"),
    "each other's": (exchanged, "the whole exp_avg", "the whole exp_avg"),
    "a view": (of_one_element_less, "the whole exp_avg", "the whole exp_avg"),
    "other ranges": (moved, "other ranges", "other ranges"),
    "another codec": (other_codec(*MOMENTS), None, None),
    "another codec of one": (other_codec("exp_avg"), None, "exp_avg_sq .*codec log"),
}


def load(optimizer, p, entries):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entries}})


def assign(optimizer, p, entries):
    optimizer.state[p] = entries


def check_refused(optimizer, p, arrive, entries, message):
    """Check that nothing changes when entries arrive and a step is taken."""
    good, before = optimizer.state[p], [p.detach().clone(), bytes_of(optimizer.state_dict())]
    with pytest.raises(ValueError, match=message):
        arrive(optimizer, p, entries)
        optimizer.step()
    optimizer.state[p] = good
    assert_same([p.detach().clone(), bytes_of(optimizer.state_dict())], before)


def buffers_of(optimizer, p):
    return [buffers(optimizer.state[p][which]) for which in MOMENTS]


@pytest.mark.parametrize("arrive", [load, assign])
@pytest.mark.parametrize("name", CASES)
def test_zero_state_is_fitted_as_if_it_were_written_or_refused(name, arrive):
    (p,), optimizer = zero_optimizer()
    run(optimizer, [p], 1)
    change, *messages = CASES[name]
    entries = copy.deepcopy(optimizer.state[p])
    moments = change({which: entries.pop(which) for which in MOMENTS})
    entries |= moments
    message = messages[arrive is assign]
    if message is not None:
        check_refused(optimizer, p, arrive, entries, message)
        return
    (q,), twin = zero_optimizer()
    run(twin, [q], 1)
    assert optimizer.state[p]["history"] < 53
    for which in MOMENTS:
        twin.state[q][which].copy_(entries[which].clone())
    arrive(optimizer, p, entries)
    if arrive is load and name != "overlapping":  # which no encoding makes
        assert_same(buffers_of(optimizer, p), buffers_of(twin, q))
    optimizer.step()
    twin.step()
    assert twin.state[q]["history"] > 1e38  # of what was written nobody knows the bound
    assert p.isfinite().all() and optimizer.state[p]["step"] == 2
    assert all(isinstance(optimizer.state[p][which], MomentTensor) for which in MOMENTS)
    if arrive is assign and "dense" in name:  # else the codec is kept
        assert torch.equal(p, q) and bytes_of(optimizer.state_dict()) == bytes_of(twin.state_dict())


def test_zero_partition_refuses_the_state_of_a_whole_parameter():
    (p,), optimizer = zero_optimizer()
    run(optimizer, [p], 1)
    header = torch.tensor([1, 0, 0, 5, p.numel()])
    entries = {"step": 1, "history": 1.0, "format": header}
    entries |= {which: torch.zeros(p.numel()) for which in MOMENTS}
    check_refused(optimizer, p, assign, entries, "whole parameter for a ZeRO partition")
