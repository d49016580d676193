# SPDX-License-Identifier: Apache-2.0
"""As test_state_arrival.py, but for partitions of ZeRO 1 to 3 and for states on a disk.

One rank; run by test_sanitized.py, in a process of its own.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nests import difference
from nvme_worker import make_tower, nvme_config, swapped_in, swapper_of
from zero_worker import Bag, base_optimizer, config, make_engine, plain, take_step

from zero8.deepspeed import swap_file
from zero8.deepspeed.moment_tensor import HEADER, MomentTensor
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MOMENTS = ("exp_avg", "exp_avg_sq")
STAGES = (2, 3)


@pytest.fixture(scope="module")
def partitions():
    """By stage the optimizer, a partition, and its state, which a test may take out for a while."""
    made = {}
    for stage in STAGES:
        engine = make_engine(config(stage=stage), Bag())
        take_step(engine, 0)
        optimizer = base_optimizer(engine)
        p = next(p for p, state in optimizer.state.items() if state)
        optimizer.param_groups[0]["params"] = [p]  # as stage 3 has it within a step only
        p.grad = torch.ones_like(p)
        made[stage] = engine, optimizer, p
    return made


def contents(optimizer, p):
    return [p.detach().clone(), {key: plain(value) for key, value in optimizer.state[p].items()}]


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


def swapped(moments):
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
    return {
        which: MomentTensor(moment.store, 0, moment.numel() - 1)
        for which, moment in moments.items()
    }


def other_codec(which):
    """A moment of another codec, well formed; `which` may name one of them or both."""

    def change(moments):
        for name in which:
            store = moments[name].store
            other = MomentStore.zeros(CODECS["dynamic"], ADAM.moment(name), store.table)
            other.write(0, store.read(0, store.table.numel))
            moments[name] = MomentTensor(other)
        return moments

    return change


def dense(*which, change=lambda values: values):
    def made(moments):
        return moments | {name: change(moments[name].dense()) for name in which}

    return made


def first_of(values):
    return values[:1].expand(values.shape)


def without_storage(values):
    values.untyped_storage().resize_(3)
    return values


# What changes in the moments; what a load does; what a step after an assignment does: None is
# "fits", else what the refusal says.
CASES = {
    "both dense": (dense(*MOMENTS), None, None),
    "exp_avg dense and expanded": (dense("exp_avg", change=first_of), None, None),
    "exp_avg dense and cut": (dense("exp_avg", change=lambda x: x[:3]), "of 3;", "of 3;"),
    "exp_avg dense on meta": (dense("exp_avg", change=lambda x: x.to("meta")), "meta", "meta"),
    "exp_avg dense, shrunk": (dense("exp_avg", change=without_storage), "storage", "storage"),
    "exp_avg sparse": (dense("exp_avg", change=torch.Tensor.to_sparse), "layout", "layout"),
    "no exp_avg": (lambda m: {"exp_avg_sq": m["exp_avg_sq"]}, "without", "without"),
    "codes cut": (with_store("exp_avg", codes=lambda t: t[:3]), "exp_avg codes", "exp_avg codes"),
    "roots cut": (with_store("exp_avg_sq", scales=lambda t: t[:, 0]), "sq scales", "sq scales"),
    "values cut": (with_store("exp_avg", dense=lambda t: t[:0]), "float32 values", "float32 val"),
    "codes shrunk": (with_store("exp_avg_sq", codes=without_storage), "storage", "storage"),
    "codes expanded": (with_store("exp_avg", codes=first_of), "strides", "strides"),
    "scales on meta": (with_store("exp_avg", scales=lambda t: t.to("meta")), "meta", "meta"),
    "scales of integers": (
        with_store("exp_avg", scales=lambda t: t.view(torch.int32)), "dtype", "dtype"
    ),
    "overlapping": (overlapping, None, "share memory"),
    "each other's": (swapped, "the whole exp_avg", "the whole exp_avg"),
    "a view": (of_one_element_less, "the whole exp_avg", "the whole exp_avg"),
    "other ranges": (moved, "other ranges", "other ranges"),
    "another codec": (other_codec(MOMENTS), None, None),
    "another codec of one": (other_codec(MOMENTS[:1]), None, "exp_avg_sq .*codec log"),
}  # fmt: skip


def entries_of(state, change):
    """Return a state in memory of its own with changed moments."""
    moments = {which: copy.deepcopy(state[which]) for which in MOMENTS}
    return {"step": state["step"], "history": state["history"], **change(moments)}


@pytest.mark.parametrize("way", ["load", "assign"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_zero_state_is_fitted_or_refused(partitions, stage, name, way):
    engine, optimizer, p = partitions[stage]
    change, load_message, step_message = CASES[name]
    good, groups = dict(optimizer.state[p]), optimizer.param_groups
    entries = entries_of(good, change)
    before = contents(optimizer, p)
    message = load_message if way == "load" else step_message
    try:
        arrive, arguments = optimizer.state.__setitem__, (p, entries)
        if way == "load":
            arrive = optimizer.load_state_dict
            arguments = ({**optimizer.state_dict(), "state": {0: entries}},)
        if message is None:
            arrive(*arguments)
            optimizer.step()
            assert torch.isfinite(p).all()
            assert optimizer.state[p]["step"] == good["step"] + 1
            assert all(isinstance(optimizer.state[p][which], MomentTensor) for which in MOMENTS)
            return
        with pytest.raises(ValueError, match=message):
            arrive(*arguments)
            optimizer.step()
        if way != "load":
            optimizer.state[p] = good
        assert difference(contents(optimizer, p), before) == ""
    finally:
        optimizer.state[p] = good
        optimizer.param_groups = groups
        p.data.copy_(before[0])
        for which in MOMENTS:
            for buffer, was in zip(good[which].store.buffers, before[1][which], strict=True):
                buffer.copy_(was)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_partition_refuses_the_state_of_a_whole_parameter(partitions, stage):
    _, optimizer, p = partitions[stage]
    good = optimizer.state[p]
    numel = p.numel()
    optimizer.state[p] = {
        "step": 1, "history": 1.0, "format": torch.tensor([1, 0, 0, 5, numel]),
        "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel),
    }  # fmt: skip
    before = p.detach().clone()
    try:
        with pytest.raises(ValueError, match="whole parameter for a ZeRO partition"):
            optimizer.step()
        assert torch.equal(p, before)
    finally:
        optimizer.state[p] = good


# --- On a disk -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    """An engine whose states are swapped, after a step."""
    engine = make_tower(nvme_config(tmp_path_factory.mktemp("nvme")))
    tokens = torch.arange(48).view(4, 12) % 60
    take_step(engine, tokens, tokens)
    return engine


def headers(change):
    """Change the headers of both moments in a file."""
    return lambda saved: [change(saved[which][HEADER]) for which in MOMENTS]


def each_piece(**values):
    return headers(
        lambda header: [piece.update(values) for piece in header["pieces"] if piece["block_size"]]
    )


def exchanged(saved):
    saved["exp_avg"], saved["exp_avg_sq"] = saved["exp_avg_sq"], saved["exp_avg"]


DISK = {
    "blocks of 65536": (each_piece(block_size=65536), "damaged"),
    "blocks of 2**62": (each_piece(block_size=2**62), "damaged"),
    "other first": (each_piece(first=64), "other ranges|damaged"),
    "another codec": (headers(lambda header: header.update(codec=1)), "damaged"),
    "moments exchanged": (exchanged, "the whole exp_avg"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISK)
def test_zero3_nvme_file_that_was_crafted_is_fitted_or_refused(tower, name):
    """The hash is right: whoever writes such a file can compute it."""
    change, message = DISK[name]
    zero, swapper = tower.optimizer, swapper_of(tower)
    path = Path(swapper.state_path(zero.fp32_partitioned_groups_flat[0]))
    data, written = path.read_bytes(), dict(swapper._written)
    saved = torch.load(path, weights_only=True)
    change(saved)
    swapper.expect_other_files()  # as if a checkpoint had brought it
    try:
        torch.save(saved | {"hash": swap_file.hash_of(saved)}, path)
        with pytest.raises(ValueError, match=message), swapped_in(zero, 0):
            pass
        zero._release_swap_buffers(0)
    finally:
        path.write_bytes(data)
        swapper._written = written


def test_zero3_nvme_state_assigned_while_it_is_in_memory_is_checked_before_it_is_written(tower):
    zero, swapper = tower.optimizer, swapper_of(tower)
    with swapped_in(zero, 1) as p:
        state = base_optimizer(tower).state[p]
        good = dict(state)
        for name in ("codes cut", "scales on meta", "each other's", "no exp_avg"):
            change, _, message = CASES[name]
            state.clear()
            state.update(entries_of(good, change))
            with pytest.raises(ValueError, match=message):
                swapper._write(p)
        state.clear()
        state.update(good)
