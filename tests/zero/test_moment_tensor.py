# SPDX-License-Identifier: Apache-2.0
"""A moment that DeepSpeed may narrow, read, write and move as if it were a float32 tensor."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from moment_samples import (
    MOMENTS,
    NUMEL,
    buffers,
    copies,
    is_plain,
    moment,
    same,
    values_for,
)

from zero8.deepspeed.moment_tensor import MomentTensor, moment_of
from zero8.spec.codec import CODECS

# --- Looking and reading -------------------------------------------------------------------------


def test_moment_looks_like_the_float32_partition_and_holds_bytes():
    x = moment()
    assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == (
        (NUMEL,),
        torch.float32,
        "cpu",
        True,
    )
    codes, scales, dense = buffers(x)
    # Blocks: 256 of the first row's rest, its 44, 256 + 44, and 150 - 150 = 0 of the third; rows
    # of 64 from 4000 = 62.5 rows to 4800 = 75 rows.
    assert (codes.dtype, len(codes), len(scales), len(dense)) == (torch.uint8, 1400, 5 + 13, 9)
    with pytest.raises(RuntimeError, match="data pointer"):
        x.data_ptr()  # no float32 memory behind it


READS = {
    "add": lambda x: x + 1.0,
    "from a plain tensor": lambda x: torch.ones(NUMEL) - x,
    "norm": lambda x: x.norm(),
    "cat": lambda x: torch.cat([x, x]),
    "mask": lambda x: x[torch.arange(NUMEL) % 2 == 0],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "out": lambda x: torch.mul(x, 2.0, out=torch.empty(NUMEL)),
    "added to": lambda x: torch.ones(NUMEL).add_(x),
    "foreach": lambda x: torch._foreach_add([x], 1.0)[0],
    "clone": lambda x: x.clone(),
    "clone of a view": lambda x: x.narrow(0, 100, 700).clone(),
    "copied from": lambda x: torch.empty(NUMEL).copy_(x),
    "view copied from": lambda x: torch.empty(7).copy_(x[600:607]),
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", MOMENTS)
def test_read_any_operation_equals_that_on_the_decoded_tensor(codec, which):
    x = moment(codec, which)
    dense = x.store.read(0, NUMEL)
    for name, read in READS.items():
        got, expected = read(x), read(dense)
        assert is_plain(got), name
        assert torch.equal(got, expected), name


REFUSED_VIEWS = {
    "one element": lambda x: x[700],
    "stride": lambda x: x[::3],
    "two dimensions": lambda x: x.view(2, -1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "split": lambda x: x.split(712)[1],
    "as_strided": lambda x: x.as_strided((2, 2), (2, 1)),
}


@pytest.mark.parametrize("view", REFUSED_VIEWS.values(), ids=REFUSED_VIEWS)
def test_view_other_than_a_range_is_refused_as_writes_to_it_would_be_lost(view):
    with pytest.raises(NotImplementedError, match="clone"):
        view(moment())


# --- Live views ----------------------------------------------------------------------------------

VIEWS = {
    "detach": (lambda x: x.detach(), 0, NUMEL),
    "data": (lambda x: x.data, 0, NUMEL),
    "alias": (lambda x: torch.ops.aten.alias.default(x), 0, NUMEL),
    "view(-1)": (lambda x: x.view(-1), 0, NUMEL),
    "view(n)": (lambda x: x.view(NUMEL), 0, NUMEL),
    "flatten": (lambda x: x.flatten(), 0, NUMEL),
    "narrow": (lambda x: x.narrow(0, 100, 700), 100, 700),
    "narrow of narrow": (lambda x: x.narrow(0, 100, 700).narrow(0, 30, 40), 130, 40),
    "slice": (lambda x: x[580:], 580, NUMEL - 580),
    "slice from the end": (lambda x: x[-50:-20], NUMEL - 50, 30),
    "slice past the end": (lambda x: x[1400:9999], 1400, NUMEL - 1400),
    "empty": (lambda x: x.narrow(0, 700, 0), 700, 0),
    "data of narrow": (lambda x: x.narrow(0, 100, 700).data, 100, 700),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_live_in_both_directions(name):
    make, start, numel = VIEWS[name]
    x = moment()
    view = make(x)
    assert isinstance(view, MomentTensor)
    assert (view.shape, view.start) == ((numel,), start)
    # The optimizer changes codes in place: views taken before must show it.
    x.store.codes.copy_(moment(seed=2).store.codes)
    assert torch.equal(view.dense(), x.dense()[start : start + numel])
    # DeepSpeed writes through them.
    view.data.copy_(torch.zeros(numel))
    assert x.dense()[start : start + numel].eq(0).all()
    assert view.store is x.store


# --- Writing -------------------------------------------------------------------------------------

ROUND = torch.arange(NUMEL) % 7 - 3.0  # exact in bfloat16
WRITES = {
    "copy_": (lambda x: x.copy_(ROUND), ROUND),
    "copy_ of bfloat16": (lambda x: x.copy_(ROUND.bfloat16()), ROUND),
    "copy_ of one element": (lambda x: x.copy_(torch.full((1,), 2.0)), torch.full((NUMEL,), 2.0)),
    "zero_": (lambda x: x.zero_(), torch.zeros(NUMEL)),
    "fill_": (lambda x: x.fill_(0.5), torch.full((NUMEL,), 0.5)),
    "fill_ with a tensor": (lambda x: x.fill_(torch.tensor(0.5)), torch.full((NUMEL,), 0.5)),
    "data": (lambda x: setattr(x, "data", ROUND), ROUND),
    "data of a view": (lambda x: setattr(x[:], "data", ROUND), ROUND),
    "data of data": (lambda x: x.data.data.copy_(ROUND), ROUND),
    "range of data": (lambda x: x.data.__setitem__(slice(None), ROUND), ROUND),
    "real": (lambda x: setattr(x, "real", ROUND), ROUND),
}


@pytest.mark.parametrize(("write", "values"), WRITES.values(), ids=WRITES)
def test_write_is_encoded_as_by_the_store(write, values):
    x, expected = moment(seed=2), moment(seed=3).store
    view = x[100:900]
    write(x)
    expected.write(0, values)
    assert same(buffers(x), expected.buffers) and x.store.written
    assert torch.equal(view.clone(), expected.read(100, 800))
    assert x.dense()[:2].eq(0).all() and x.dense()[611:620].eq(0).all()  # padding


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", MOMENTS)
def test_copy_of_decoded_values_changes_nothing(codec, which):
    x = moment(codec, which)
    before = copies(x)
    x.copy_(x.clone())
    for start in range(0, NUMEL, 97):
        view = x.narrow(0, start, min(97, NUMEL - start))
        view.copy_(view.clone())
    assert same(buffers(x), before)


def test_copy_between_moments_takes_codes_and_scales_verbatim():
    """A codes/scales pair that no quantization makes must arrive as it is."""
    source, target = moment(seed=3), moment(seed=4)
    source.store.codes.copy_(torch.arange(1400) % 251)
    target.copy_(source)
    assert same(buffers(target), buffers(source))
    source.zero_()
    assert target.dense().abs().max() > 0


def test_copy_between_moments_of_other_codec_or_range_goes_by_value():
    source, target, expected = moment("log"), moment("dynamic"), moment("dynamic")
    for there, here in ((slice(None), slice(None)), (slice(620, 720), slice(700, 800))):
        target[there].copy_(source[here])
        expected[there].copy_(source[here].clone())
        assert same(buffers(target), buffers(expected))


WRITES_REFUSED = {
    "add_": lambda x: x.add_(1.0),
    "mul_": lambda x: x.mul_(0.5),
    "lerp_": lambda x: x.lerp_(torch.ones(NUMEL), 0.5),
    "+=": lambda x: x.__iadd__(1.0),
    "data.mul_": lambda x: x.data.mul_(0.5),
    "view.mul_": lambda x: x.narrow(0, 3, 9).mul_(0.5),
    "addcmul_": lambda x: x.addcmul_(torch.ones(NUMEL), torch.ones(NUMEL)),
    "mask": lambda x: x.__setitem__(torch.arange(NUMEL) % 2 == 0, 1.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([3]), torch.ones(1)),
    "clamp_": lambda x: x.clamp_(max=0.5),
    "set_": lambda x: x.set_(torch.ones(NUMEL)),
    "resize_": lambda x: x.resize_(5),
    "out": lambda x: torch.add(torch.ones(NUMEL), 1.0, out=x),
    "foreach mul": lambda x: torch._foreach_mul_([x], 0.5),
    "foreach zero": lambda x: torch._foreach_zero_([torch.ones(3), x]),
    "foreach copy": lambda x: torch._foreach_copy_([x], [torch.ones(NUMEL)]),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(
        torch.ones(2, NUMEL), x, x.clone(), training=True
    ),
}


@pytest.mark.parametrize("name", WRITES_REFUSED)
def test_write_other_than_copy_is_refused_and_changes_nothing(name):
    """Such a write would change a decoded copy and be lost."""
    x = moment()
    before = copies(x)
    with pytest.raises(NotImplementedError, match=r"moment\.copy_\(values\)"):
        WRITES_REFUSED[name](x)
    assert same(buffers(x), before)


def test_data_of_another_shape_is_refused_and_changes_nothing():
    x = moment()
    before = copies(x)
    for values in (torch.ones(5), torch.ones(1)):
        with pytest.raises(ValueError, match="for an 8-bit moment of 1424 elements"):
            x.data = values
    assert same(buffers(x), before)


# --- Collectives ---------------------------------------------------------------------------------

SENT = {
    "all_gather": lambda x, y: dist.all_gather([y], x),
    "all_gather_into_tensor": lambda x, y: dist.all_gather_into_tensor(y, x),
    "gather": lambda x, y: dist.gather(x, [y]),
    "reduce_scatter": lambda x, y: dist.reduce_scatter(y, [x]),
    "reduce_scatter_tensor": lambda x, y: dist.reduce_scatter_tensor(y, x),
    "all_to_all_single": lambda x, y: dist.all_to_all_single(y, x),
}
"""Collectives of one rank that send x and write y."""
LISTS = ("all_gather", "gather")
"""Those whose lists of outputs torch fills by `copy_`."""
REFUSED = {
    **{name: partial(send, torch.ones(NUMEL)) for name, send in SENT.items() if name not in LISTS},
    **{f"{name} of a moment": partial(send, moment(seed=2)) for name, send in SENT.items()},
    "scatter": lambda x: dist.scatter(x, [torch.ones(NUMEL)]),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_reduce": dist.all_reduce,
    "all_reduce without waiting": lambda x: dist.all_reduce(x, async_op=True),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x]),
    "reduce": lambda x: dist.reduce(x, 0),
    "recv": lambda x: dist.irecv(x, 0),
    "functional, in place": lambda x: torch.ops._c10d_functional.all_reduce_(x, "sum", "0"),
}


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", SENT.values(), ids=SENT)
def test_collective_of_a_moment_sends_its_values(one_rank, collective):
    x, y = moment(), torch.zeros(NUMEL)
    collective(x, y)
    assert torch.equal(y, x.dense())


@pytest.mark.parametrize("collective", REFUSED.values(), ids=REFUSED)
def test_collective_into_a_moment_is_refused_and_changes_nothing(one_rank, collective):
    x = moment()
    before = copies(x)
    with pytest.raises(NotImplementedError, match=r"moment\.copy_\(values\)"):
        collective(x)
    assert same(buffers(x), before)


@pytest.mark.parametrize("name", LISTS)
def test_collective_into_a_list_of_moments_is_encoded(one_rank, name):
    x, expected, values = moment(), moment(), values_for("exp_avg", 8)
    SENT[name](values, x)
    expected.copy_(values)
    assert same(buffers(x), buffers(expected))


def test_code_outside_the_dispatcher_is_refused_the_memory_of_a_moment(one_rank):
    for use in (lambda x: dist.scatter(torch.zeros(NUMEL), [x]), torch.utils.dlpack.to_dlpack):
        with pytest.raises(RuntimeError, match="data pointer"):
            use(moment())


def test_operation_of_collectives_without_marks_is_known_by_its_name():
    unmarked = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::") and not schema.is_mutable
    }
    reads = {"c10d::send", "c10d::barrier", "c10d::check_for_nan"}
    assert len(unmarked) > 10 and all(name.endswith("_") for name in unmarked - reads)


# --- Moving and making alike ---------------------------------------------------------------------


def test_to_dtype_of_whole_changes_the_appearance_only():
    """torch's load_state_dict casts states to the parameter's dtype."""
    x = moment()
    y = x.to(torch.bfloat16)
    assert isinstance(y, MomentTensor) and y.dtype == torch.bfloat16
    assert same(buffers(y), buffers(x))
    assert torch.equal(y.clone(), x.dense().bfloat16())
    back = y.to(torch.float32)
    assert torch.equal(back.clone(), x.dense())
    back.zero_()  # a copy, as `to` makes it
    assert x.dense().abs().max() > 0 and y.dense().abs().max() > 0


def test_to_dtype_of_a_view_is_dense():
    view = moment()[100:800]
    assert is_plain(view.to(torch.float64))
    assert torch.equal(view.to(torch.float64), view.dense().double())


@pytest.mark.parametrize("like", [torch.empty_like, torch.zeros_like])
def test_like_of_a_moment_is_a_plain_tensor_that_collectives_can_fill(like):
    for x in (moment("log", "exp_avg_sq"), moment()[5:9]):
        y = like(x)
        assert is_plain(y) and (y.shape, y.dtype) == (x.shape, torch.float32)
    assert like(moment(), dtype=torch.bfloat16).dtype == torch.bfloat16


COPIES = {
    "deepcopy": copy.deepcopy,
    "to": lambda x: x.to(torch.bfloat16),
    "pickle": lambda x: moment_of(pickle.loads(pickle.dumps(x))),
    "copy_": lambda x: moment(seed=5).copy_(x),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_of_a_written_moment_counts_as_written(copied):
    """Its bound on m^2/v is not that of the steps that have been counted."""
    x = moment(seed=3)
    x.store.written = False
    assert not copied(x).store.written or copied is COPIES["copy_"]
    x.fill_(2.0)
    assert copied(x).store.written
