# SPDX-License-Identifier: Apache-2.0
"""A moment that DeepSpeed may narrow, read, write and move as if it were a float32 tensor."""

import copy
import io
import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param
from moment_samples import MOMENTS, NUMEL, buffers, copies, flipped_in, is_plain, moment, same
from processes import run, without
from small_optimizers import bytes_of, through_file
from zero_worker import config, make_engine, train

from zero8.deepspeed.moment_tensor import HEADER, MomentTensor, moment_of, with_moments
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
    "norm": lambda x: x.norm(),
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


# --- Live views ----------------------------------------------------------------------------------

VIEWS = {
    "detach": (lambda x: x.detach(), 0, NUMEL),
    "data": (lambda x: x.data, 0, NUMEL),
    "view(-1)": (lambda x: x.view(-1), 0, NUMEL),
    "narrow": (lambda x: x.narrow(0, 100, 700), 100, 700),
    "narrow of narrow": (lambda x: x.narrow(0, 100, 700).narrow(0, 30, 40), 130, 40),
    "slice": (lambda x: x[580:], 580, NUMEL - 580),
    "slice from the end": (lambda x: x[-50:-20], NUMEL - 50, 30),
    "empty": (lambda x: x.narrow(0, 700, 0), 700, 0),
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
    "data": (lambda x: setattr(x, "data", ROUND), ROUND),
    "data of data": (lambda x: x.data.data.copy_(ROUND), ROUND),
    "range of data": (lambda x: x.data.__setitem__(slice(None), ROUND), ROUND),
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


VALUES = torch.ones(NUMEL)
CLONE, COPY = r"moment\.clone\(\)", r"moment\.copy_\(values\)"
# What is not served, and what the refusal says to do instead.  A view but of a range, or such a
# write, would change a decoded copy and be lost.  Collectives do not mark what they write, and may
# write it after they return.
REFUSED = {
    "one element": (lambda x: x[700], CLONE),
    "stride": (lambda x: x[::3], CLONE),
    "two dimensions": (lambda x: x.view(2, -1), CLONE),
    "as_strided": (lambda x: x.as_strided((2, 2), (2, 1)), CLONE),
    "add_": (lambda x: x.add_(1.0), COPY),
    "view.mul_": (lambda x: x.narrow(0, 3, 9).mul_(0.5), COPY),
    "mask": (lambda x: x.__setitem__(torch.arange(NUMEL) % 2 == 0, 1.0), COPY),
    "index_copy_": (lambda x: x.index_copy_(0, torch.tensor([3]), torch.ones(1)), COPY),
    "resize_": (lambda x: x.resize_(5), COPY),
    "out": (lambda x: torch.add(VALUES, 1.0, out=x), COPY),
    "foreach copy": (lambda x: torch._foreach_copy_([x], [VALUES]), COPY),
    "all_gather": (lambda x: dist.all_gather([VALUES], x), CLONE),
    "reduce_scatter_tensor": (lambda x: dist.reduce_scatter_tensor(x, VALUES), CLONE),
    "broadcast": (lambda x: dist.broadcast(x, 0), CLONE),
    "recv": (lambda x: dist.irecv(x, 0), CLONE),
    "functional": (lambda x: torch.ops._c10d_functional.all_reduce_(x, "sum", "0"), CLONE),
    "data of another shape": (lambda x: setattr(x, "data", VALUES[:1]), "of 1424 elements"),
}


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", REFUSED)
def test_operation_that_cannot_be_served_is_refused_and_changes_nothing(one_rank, name):
    operation, message = REFUSED[name]
    x = moment()
    before = copies(x)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        operation(x)
    assert same(buffers(x), before)


# --- Copies and files ----------------------------------------------------------------------------

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
    x.copy_(torch.full((1,), 2.0))
    assert copied(x).store.written


def test_deepcopy_of_a_state_keeps_moments_8bit_and_apart_from_the_original():
    x = moment()
    state = {"exp_avg": x, "again": x, "fragment": x[100:200]}
    copied = copy.deepcopy(state)
    assert isinstance(copied["exp_avg"], MomentTensor)
    assert copied["again"] is copied["exp_avg"]
    assert same(buffers(copied["exp_avg"]), buffers(x))
    assert is_plain(copied["fragment"])
    assert torch.equal(copied["fragment"], x[100:200].dense())
    x.zero_()
    assert copied["exp_avg"].dense().abs().max() > 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", MOMENTS)
def test_save_and_load_with_weights_only_restores_every_byte(codec, which):
    x = moment(codec, which).to(torch.bfloat16)
    y = with_moments(through_file({"exp_avg": x, "step": 3}))["exp_avg"]
    assert isinstance(y, MomentTensor) and same(buffers(y), buffers(x))
    assert y.store.table == x.store.table
    assert (y.store.codec, y.store.name) == (x.store.codec, which)


def in_header(**changes):
    return lambda found: found[HEADER].update(changes)


def in_piece(number=0, **changes):
    return lambda found: found[HEADER]["pieces"][number].update(changes)


def in_buffer(key, change):
    return lambda found: found.update({key: change(found[key])})


DAMAGES = {
    "another version": (in_header(version=4), "version 4"),
    "another algorithm": (in_header(algorithm="adagrad"), "algorithm 'adagrad'"),
    "unknown codec": (in_header(codec=99), "codec number 99"),
    "piece with other size": (in_piece(numel=599), "damaged"),
    "piece 8-bit instead of float32": (in_piece(1, block_size=64), "damaged"),
    "no pieces": (lambda found: found[HEADER].pop("pieces"), "damaged"),
    "unknown key in a piece": (in_piece(colour=3), "damaged"),
    "blocks in words": (in_piece(block_size="256"), "damaged"),
    "negative numel": (in_piece(numel=-1), "damaged"),
    "two at one place": (in_piece(1, start=2), "damaged"),
    "an identity of 65 bits": (in_piece(identity=2**64), "damaged"),
    "unknown moment": (in_header(which="exp_max"), "damaged"),
    "codes short": (in_buffer("codes", lambda t: t[:-1]), "damaged"),
    "codes as float": (in_buffer("codes", torch.Tensor.float), "damaged"),
    "sparse codes": (in_buffer("codes", torch.Tensor.to_sparse), "expected"),
    "scales on meta": (in_buffer("scales", lambda t: t.to("meta")), "expected"),
    "no hash": (in_header(hash=None), "its bytes have the hash .*; the file is damaged"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_load_of_a_damaged_moment_is_refused(damage, message):
    found = pickle.loads(pickle.dumps(moment()))
    damage(found)
    with pytest.raises(ValueError, match=message):
        moment_of(found)


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_load_of_a_moment_with_a_flipped_bit_is_refused_by_its_name(number, is_legacy):
    """torch compares no CRCs."""
    which, x = "exp_avg", moment()
    data = bytes_of({which: x}, _use_new_zipfile_serialization=not is_legacy)
    data = flipped_in(data, buffers(x)[number])
    damaged = torch.load(io.BytesIO(data), weights_only=not is_legacy)
    message = f"moment {which} of 'layers.0.weight' and 2 more: its bytes .*; the file is damaged"
    with pytest.raises(ValueError, match=message):
        with_moments(damaged)


# --- Without zero8 -------------------------------------------------------------------------------

LAYOUTS = {
    "two": config(stage=2),
    "three": config(stage=3),
    "lion": config(stage=2, optimizer="Lion8bitBlockwise", dtype={}),
}
WEIGHTS = """
import runpy, torch
_, folder, *tags = sys.argv
weights_of = runpy.run_path(f"{folder}/zero_to_fp32.py")["get_fp32_state_dict_from_zero_checkpoint"]
for tag in tags:
    torch.save(weights_of(folder, tag), f"{folder}/{tag}.weights")
assert "zero8" not in sys.modules
"""


def save_all(folder):
    """Save a checkpoint of each layout; return their master weights."""
    masters = {}
    for tag, ds_config in LAYOUTS.items():
        engine = make_engine(ds_config)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=tag)
        named = engine.module.named_parameters()
        masters[tag] = {name: safe_get_full_fp32_param(p).clone() for name, p in named}
    return masters


def test_files_of_zero_give_their_weights_where_zero8_is_missing(standing_ranks, tmp_path):
    masters = standing_ranks(2).run(save_all, folder=str(tmp_path))[0]
    command = [sys.executable, "-c", without("zero8") + WEIGHTS, str(tmp_path), *LAYOUTS]
    done = run(command, 120, TORCH_DEVICE_BACKEND_AUTOLOAD="0", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    # What this Python pickles DeepSpeed's enums by: their class; in Debian 12's 3.11.2 getattr.
    of_enums = ZeroStageEnum.weights.__reduce_ex__(2)[0]
    for tag, expected in masters.items():
        found = torch.load(tmp_path / f"{tag}.weights", weights_only=True)
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        for path in (tmp_path / tag).glob("*.pt"):
            needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            ours = set(needed) - {f"{of_enums.__module__}.{of_enums.__qualname__}"}
            assert all(name.startswith("deepspeed.") for name in ours), needed
