# SPDX-License-Identifier: Apache-2.0
"""What states do on a pretended GPU, and what on the CPU: a process of its own, see `main`."""

import copy
import json
import traceback
from contextlib import contextmanager

import torch
from fake_gpu_tensors import DEVICE, Gpu, crossings
from moment_samples import MOMENTS, NUMEL, moment, values_for

from zero8.checkpoint.read.foreign import from_foreign, to_bitsandbytes
from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec import dither
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, dequantize, quantize
from zero8.state.extent import Extent
from zero8.state.plain import PlainState
from zero8.state.table import Piece
from zero8.state.target import Target

CHECKS = {}
TABLE_NUMEL = 256
"""Elements of the largest table of a codec: more than that must not cross."""


def check(function):
    """Have `main` run a function for each codec."""
    CHECKS[function.__name__] = function
    return function


@contextmanager
def staying():
    """Check that nothing larger than a table crosses in the block."""
    crossings.clear()
    yield
    assert all(numel <= TABLE_NUMEL for numel in crossings), crossings


def bits(x):
    return x.contiguous().view(torch.uint8) if x.numel() else x


def assert_same(on_gpu, on_cpu):
    """Check that tensors on the pretended GPU have the bits of others on the CPU."""
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        assert type(ours) is Gpu and type(expected) is torch.Tensor, (type(ours), type(expected))
        assert ours.raw.dtype == expected.dtype and ours.shape == expected.shape
        assert torch.equal(bits(ours.raw), bits(expected))


def stores(codec, which):
    """Return equal moments on the pretended GPU and on the CPU, filled."""
    on_cpu = moment(codec, which).store
    return on_cpu.to("gpu:0"), on_cpu


@check
def quantize_and_dequantize(codec):
    for which in MOMENTS:
        code, x = CODECS[codec].code_of(ADAM.moment(which)), values_for(which, 2, 1000)
        block, thresholds = torch.arange(1000) // 100, dither.hashed(5, 0, 1000)
        on_gpu = [t.to(DEVICE) for t in (x, block, thresholds)]
        for is_dithered, settling in ((False, None), (True, None), (False, 1.1), (True, 1.01)):
            expected = quantize(code, x, block, 10, thresholds if is_dithered else None, settling)
            with staying():
                x_, block_, thresholds_ = on_gpu
                got = quantize(code, x_, block_, 10, thresholds_ if is_dithered else None, settling)
                decoded = dequantize(code, *got, block_, gain=0.9)
            assert_same([*got, decoded], [*expected, dequantize(code, *expected, block, gain=0.9)])


@check
def read_and_write(codec):
    for which in MOMENTS:
        ours, expected = stores(codec, which)
        for start, numel in ((0, NUMEL), (200, 700), (611, 50)):
            values = values_for(which, start, numel)
            for given in (values, values.to(torch.bfloat16)):
                on_gpu = given.to(DEVICE)
                with staying():
                    ours.write(start, on_gpu)
                    read = ours.read(start, numel)
                expected.write(start, given)
                assert_same([read, *ours.buffers], [expected.read(start, numel), *expected.buffers])


@check
def clone_and_to(codec):
    for which in MOMENTS:
        ours, expected = stores(codec, which)
        with staying():
            clone, same = ours.clone(), ours.to("gpu")
            copied = ours.to("gpu", copy=True)
        assert same is ours
        for copied_store in (clone, copied):
            assert_same(copied_store.buffers, expected.buffers)
            copied_store.codes.fill_(7)
        assert_same(ours.buffers, expected.buffers)
        back = ours.to("cpu")
        assert all(type(t) is torch.Tensor for t in back.buffers)
        assert_same(back.to(DEVICE).buffers, expected.buffers)


@check
def moment_tensor(codec):
    for which in MOMENTS:
        ours, expected = (MomentTensor(store) for store in stores(codec, which))
        assert ours.device == DEVICE
        given = values_for(which, 4, 300)
        on_gpu = given.to(DEVICE)
        with staying():
            ours.narrow(0, 100, 300).copy_(on_gpu)
            ours.narrow(0, 900, 50).copy_(torch.full((50,), 0.3))
        expected.narrow(0, 100, 300).copy_(given)
        expected.narrow(0, 900, 50).copy_(torch.full((50,), 0.3))
        with staying():
            read = ours.clone(), ours.narrow(0, 3, 9) + 1.0
            copied = copy.deepcopy(ours)
        assert_same(read, [expected.clone(), expected.narrow(0, 3, 9) + 1.0])
        for other in (ours, copied):
            assert_same(other.store.buffers, expected.store.buffers)
        assert ours.to("gpu") is ours
        moved = torch.ops.aten._to_copy.default(ours, device=torch.device("gpu"))
        moved.zero_()
        assert_same(ours.store.buffers, expected.store.buffers)


PIECE = Piece(0, 3 * 300, 0, (3, 300), 17, 256, "w")


def adopt(entries, codec, device):
    """Return loaded entries in the form that an optimizer with this codec keeps on a device."""
    extent = Extent.whole(PIECE.shape)
    return Target(ADAM, CODECS[codec], PIECE, extent, device).adopted(entries)


def on(device, entries):
    """Return the entries of a state with their moments on a device, as a load leaves them."""
    moved = {k: v.to(device) for k, v in entries.items() if isinstance(v, torch.Tensor)}
    return entries | moved | ({"format": entries["format"]} if "format" in entries else {})


def adam_state():
    moments = {w: values_for(w, 6, PIECE.numel).view(PIECE.shape) for w in MOMENTS}
    return {"step": 3, **moments}


@check
def adopted(codec):
    """States that are on the GPU already, and those that come from the CPU."""
    other = next(name for name in CODECS if name != codec)
    saved = {
        "fp32 Adam": adam_state(),
        "the same codec": adopt(adam_state(), codec, "cpu"),
        "another codec": adopt(adam_state(), other, "cpu"),
    }
    for entries in saved.values():
        expected = adopt(entries, codec, torch.device("cpu"))
        there = on(DEVICE, entries)
        with staying():
            from_gpu = adopt(there, codec, DEVICE)
        from_cpu = adopt(entries, codec, DEVICE)
        moments = [k for k, v in expected.items() if isinstance(v, torch.Tensor) and k != "format"]
        for got in (from_gpu, from_cpu):
            assert_same([got[k] for k in moments], [expected[k] for k in moments])
            assert got["format"].tolist() == expected["format"].tolist()
        for k, value in from_gpu.items():
            assert k not in moments or value.raw.data_ptr() not in {
                v.raw.data_ptr() for v in there.values() if isinstance(v, Gpu)
            }


@check
def saved_state(codec):
    """All that has dimensions is on one device, as torch wants it of full state dicts; and back."""
    live = adopt(adam_state(), codec, DEVICE)
    assert live["format"].device.type == "cpu"  # where steps read it
    saved = PlainState(live, Extent.whole(PIECE.shape)).saved()
    tensors = [x for x in saved.values() if isinstance(x, torch.Tensor) and x.dim()]
    assert len(tensors) == 5 and {x.device.type for x in tensors} == {"gpu"}
    back = adopt(saved, codec, DEVICE)
    assert back["format"].tolist() == live["format"].tolist()
    key = next(key for key in live if key.startswith("exp_avg_q"))
    assert_same([back[key]], [live[key].raw])


@check
def bitsandbytes_and_back(codec):
    """Rows that their blocks coincide with, and rows that they run across."""
    states = {}
    for number, shape in enumerate(((24, 512), (50, 300))):
        piece = Piece(0, shape[0] * shape[1], 0, shape, number, 256, str(number))
        dense = {w: values_for(w, 7, piece.numel).view(shape) for w in MOMENTS}
        target = Target(ADAM, CODECS[codec], piece, Extent.whole(shape))
        states[number] = target.adopted({"step": 3, **dense})
    there = {number: on(DEVICE, entries) for number, entries in states.items()}
    expected = to_bitsandbytes({"state": states, "param_groups": []})
    with staying():
        got = to_bitsandbytes({"state": there, "param_groups": []})
        back = from_foreign(got)
    for ours, theirs in ((got, expected), (back, from_foreign(expected))):
        for number, entries in theirs["state"].items():
            names = [k for k, v in entries.items() if isinstance(v, torch.Tensor) and k != "format"]
            assert_same([ours["state"][number][k] for k in names], [entries[k] for k in names])


def outcome(function, *args):
    """Return what a call raised, as text, None if nothing."""
    try:
        function(*args)
    except Exception:
        return traceback.format_exc()
    return None


def main():
    """Print, as JSON, of each check and codec what went wrong, None if nothing."""
    results = {f"{n} {c}": outcome(check, c) for n, check in CHECKS.items() for c in CODECS}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
