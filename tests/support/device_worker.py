# SPDX-License-Identifier: Apache-2.0
"""What states do on a pretended GPU, and what on the CPU.

Importing this pretends one for the whole process.
"""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from fake_gpu_tensors import DEVICE, Gpu, crossings
from moment_samples import MOMENTS, NUMEL, moment, values_for
from page_locked import page_locked

import zero8
from zero8.deepspeed import seams
from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.extent import Extent
from zero8.state.plain import saved_form
from zero8.state.table import Piece
from zero8.state.target import Target

TABLE_NUMEL = 256
"""Elements of the largest table of a codec: more than that must not cross."""


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


def read_and_write(codec):
    for which in MOMENTS:
        ours, expected = (MomentTensor(store) for store in stores(codec, which))
        assert ours.device == DEVICE and ours.to("gpu") is ours
        for start, numel in ((0, NUMEL), (200, 700), (611, 50)):
            values = values_for(which, start, numel)
            for given in (values, values.to(torch.bfloat16), torch.full((numel,), 0.3)):
                on_gpu = given.to(DEVICE)
                with staying():
                    ours.narrow(0, start, numel).copy_(on_gpu)
                    read = (
                        ours.clone(),
                        ours.narrow(0, 3, 9) + 1.0,
                        *copy.deepcopy(ours).store.buffers,
                    )
                expected.narrow(0, start, numel).copy_(given)
                buffers = expected.store.buffers
                assert_same(read, [expected.clone(), expected.narrow(0, 3, 9) + 1.0, *buffers])
        torch.ops.aten._to_copy.default(ours, device=torch.device("gpu")).zero_()
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


def saved_state(codec):
    """All that has dimensions is on one device, as torch wants it of full state dicts; and back."""
    live = adopt(adam_state(), codec, DEVICE)
    assert live["format"].device.type == "cpu"  # where steps read it
    saved = saved_form(live, Extent.whole(PIECE.shape))
    tensors = [x for x in saved.values() if isinstance(x, torch.Tensor) and x.dim()]
    assert len(tensors) == 5 and {x.device.type for x in tensors} == {"gpu"}
    back = adopt(saved, codec, DEVICE)
    assert back["format"].tolist() == live["format"].tolist()
    key = next(key for key in live if key.startswith("exp_avg_q"))
    assert_same([back[key]], [live[key].raw])


# --- offload_states of ZeRO-2 -------------------------------------------------------------------

STATES = [OffloadStateTypeEnum.optim_states]


class Zero(SimpleNamespace):
    """A ZeRO-2 optimizer after a step, with one parameter whose part is in a flat partition.

    DeepSpeed's own methods run on it.
    """

    def __init__(self, codec):
        seams.fit(zero8.Adam8bitBlockwise)
        flat = torch.nn.Parameter(torch.zeros(NUMEL))
        param = torch.nn.Parameter(torch.zeros(700))
        address = fragment_address(700, 100)
        param._hp_mapping = tensor_fragment(
            param, address, flat, address, {}, {}, False, 0, optim_fragment=None
        )
        optimizer = zero8.Adam8bitBlockwise([flat])
        expected = {which: moment(codec, which).store for which in MOMENTS}
        for store in expected.values():
            store.written = False
        on_gpu = {w: MomentTensor(store.to(DEVICE)) for w, store in expected.items()}
        optimizer.state[flat] |= {"step": 2, "history": 3.0, **on_gpu}
        super().__init__(
            optimizer=optimizer,
            offloaded_states=set(),
            bit16_groups=[[param]],
            single_partition_of_fp32_groups=[flat],
            expected=expected,
            state=optimizer.state[flat],
            mapping=param._hp_mapping,
        )
        param._hp_mapping.set_optim_state_fragment(flat, self.state)

    def offload(self, **options):
        DeepSpeedZeroOptimizer.offload_states(
            self, include=STATES, device=OffloadDeviceEnum.cpu, **options
        )

    def check(self, device):
        """Check where the moments are, that they are as they were, and that views are theirs."""
        assert (self.state["step"], self.state["history"]) == (2, 3.0)
        for which, expected in self.expected.items():
            x, view = self.state[which], self.mapping.optim_fragment[which]
            assert isinstance(x, MomentTensor) and x.device == device
            assert (x.store.nbytes, x.store.written) == (expected.nbytes, False)
            here = [t.to(DEVICE) for t in x.store.buffers]
            assert_same(here, expected.buffers)
            assert view.store is x.store and (view.start, view.numel()) == (100, 700)


def offload_and_reload(codec):
    """Page-locked memory has the moments' bytes, and the states come back as they were."""
    get_accelerator().current_device_name = lambda: "gpu:0"
    for pin_memory in (True, False):
        zero = Zero(codec)
        sizes = [t.nbytes for store in zero.expected.values() for t in store.buffers]
        with page_locked() as memory:
            zero.offload(pin_memory=pin_memory, non_blocking=pin_memory)
            zero.check(torch.device("cpu"))
            assert sorted(memory.registered.values()) == (sorted(sizes) if pin_memory else [])
            DeepSpeedZeroOptimizer.reload_states(zero)
            zero.check(DEVICE)
            assert memory.registered == {}
