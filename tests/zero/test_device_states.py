# SPDX-License-Identifier: Apache-2.0
"""States on a GPU, pretended: the bits of the CPU, devices do not mix, and moments stay there.

With `offload_states` of ZeRO 1 and 2 they stay 8-bit, and leave the GPU for good.  Page-locked
memory of zero8's own has exactly its bytes, and is the device's as long as it is used.
"""

import pytest
import torch
from page_locked import page_locked
from ranks import run_ranks

from zero8.deepspeed.page_locked import page_locked_zeros


def check(name, codec):
    """Run a function of a module that pretends a GPU for its whole process."""
    import device_worker

    getattr(device_worker, name)(codec)


@pytest.mark.parametrize("codec", ["log", "log6", "dynamic"])
@pytest.mark.parametrize("name", ["read_and_write", "adopted", "saved_state", "offload_and_reload"])
def test_state_on_a_gpu_has_the_bits_of_the_cpu_and_stays_there_or_leaves(name, codec, tmp_path):
    run_ranks(check, 1, tmp_path, name=name, codec=codec)


@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 7, 11)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_zeros_take_their_bytes_until_the_last_view_is_gone(shape, dtype):
    with page_locked() as memory:
        zeros = page_locked_zeros(shape, dtype)
        assert (zeros.shape, zeros.dtype, zeros.any().item()) == (shape, dtype, False)
        assert memory.registered == {zeros.data_ptr(): zeros.nbytes}
        assert zeros.is_pinned()
        part = zeros.view(-1)[:1].fill_(1)
        del zeros
        assert part.item() == 1 and len(memory.registered) == 1
        del part
        assert memory.registered == memory.rounded == {}


def test_zeros_without_elements_or_of_a_device_that_registers_nothing_are_its_own():
    with page_locked() as memory:
        assert page_locked_zeros((0, 3), torch.float32).shape == (0, 3)
        memory.registers = False
        zeros = page_locked_zeros((5,), torch.float32)
        assert memory.registered == {} and memory.rounded == {zeros.data_ptr(): 20}
        assert zeros.tolist() == [0.0] * 5
