# SPDX-License-Identifier: Apache-2.0
"""`offload_states` of ZeRO-2 with states on a pretended GPU: a process of its own, see `main`.

DeepSpeed's own methods run, on an object that has what they look at.
"""

import json
import weakref
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment
from device_worker import assert_same, outcome
from fake_gpu_tensors import DEVICE
from moment_samples import MOMENTS, NUMEL, moment

import zero8
from zero8.deepspeed import seams
from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec.codec import CODECS

CPU = torch.device("cpu")
STATES = [OffloadStateTypeEnum.optim_states]


class Zero(SimpleNamespace):
    """A ZeRO-2 optimizer after a step, with one parameter whose part is in a flat partition."""

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
        """Have DeepSpeed's method do it."""
        stage_1_and_2.DeepSpeedZeroOptimizer.offload_states(
            self, include=STATES, device=OffloadDeviceEnum.cpu, **options
        )

    def reload(self):
        """Have DeepSpeed's method do it."""
        stage_1_and_2.DeepSpeedZeroOptimizer.reload_states(self)

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

    def references(self):
        """Return weak references to the memory of the moments."""
        return [weakref.ref(t) for which in MOMENTS for t in self.state[which].store.buffers]


def offload_and_reload(codec):
    """Memory is page-locked as DeepSpeed does it, and the states come back as they were."""
    accelerator, asked = get_accelerator(), []
    pin_empty_like = type(accelerator).pin_empty_like

    def noted(tensor, device="cpu", dtype=None):
        asked.append((tensor.dtype, tensor.numel()))
        return pin_empty_like(accelerator, tensor, device, dtype)

    accelerator.pin_empty_like, accelerator.current_device_name = noted, lambda: "gpu:0"
    for options in ({}, {"non_blocking": True}, {"pin_memory": False}):
        zero = Zero(codec)
        asked.clear()
        zero.offload(**options)
        zero.check(CPU)
        locked = [(t.dtype, t.numel()) for s in zero.expected.values() for t in s.buffers]
        assert asked == (locked if options.get("pin_memory", True) else [])
        zero.reload()
        zero.check(DEVICE)


def memory_on_the_gpu_is_free_before_its_cache_is_emptied(codec):
    """DeepSpeed does that last; what is freed later the GPU does not get back."""
    accelerator, alive = get_accelerator(), []
    for options in ({}, {"pin_memory": False}):
        zero = Zero(codec)
        references = zero.references()
        accelerator.empty_cache = lambda r=references: alive.append([ref() for ref in r])
        zero.offload(**options)
        assert alive.pop() == [None] * 6
        references = zero.references()
        accelerator.current_device_name = lambda: "gpu:0"
        zero.reload()
        assert [ref() for ref in references] == [None] * 6


CHECKS = (
    offload_and_reload,
    memory_on_the_gpu_is_free_before_its_cache_is_emptied,
)


def main():
    """Print, as JSON, of each check and codec what went wrong, None if nothing."""
    results = {f"{f.__name__} {c}": outcome(f, c) for f in CHECKS for c in CODECS}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
