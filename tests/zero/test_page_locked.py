# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory of zero8's own: exactly its bytes, the device's as long as it is used."""

import pytest
import torch
from page_locked import page_locked

from zero8.deepspeed.page_locked import page_locked_zeros


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
