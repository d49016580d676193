# SPDX-License-Identifier: Apache-2.0
"""The loop that moves the memory of a step: it reaches every byte, and changes none."""

import numpy as np
import psutil
import pytest
import torch

from zero8.op import kernel

KINDS = {
    "fp32": (torch.float32, (torch.uint8, torch.uint8)),
    "bf16 corrected": (torch.bfloat16, (torch.uint8, torch.uint8, torch.int8)),
    "fp32 states": (torch.float32, (torch.float32, torch.float32)),
    "no states": (torch.bfloat16, ()),
}


def arrays(dtypes, numel):
    """Return arrays of random bytes between 64 bytes that nothing may touch."""
    generator = torch.Generator().manual_seed(numel)
    framed = []
    for dtype in dtypes:
        size = dtype.itemsize
        data = torch.randint(256, ((numel + 128) * size,), generator=generator, dtype=torch.uint8)
        framed.append(data)
    return framed, [x.view(dtype)[64 : 64 + numel] for x, dtype in zip(framed, dtypes, strict=True)]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize(("dtype", "states"), KINDS.values(), ids=KINDS)
def test_copy_odd_sizes_and_threads_changes_no_byte(dtype, states, numel, threads):
    framed, (param, grad, *moments) = arrays((dtype, dtype, *states), numel)
    before = [x.clone() for x in framed]
    kernel.copy(param, grad, moments, threads)
    assert all(map(torch.equal, framed, before))


def test_copy_writes_every_page_of_param_and_states_and_none_of_grad():
    # Pages of these have no memory of their own before something writes to them.
    numel = 2**23
    param, grad, *states = (torch.from_numpy(np.zeros(numel, np.uint8)) for _ in range(4))
    resident = psutil.Process().memory_info().rss
    kernel.copy(param, grad, states, 2)
    written = psutil.Process().memory_info().rss - resident
    assert written == pytest.approx(3 * numel, abs=2**20)


@pytest.mark.parametrize(
    ("grad", "state", "message"),
    [
        (torch.zeros(8), torch.zeros(9), "different numbers of elements"),
        (torch.zeros(7), torch.zeros(8), "different numbers of elements"),
    ],
)
def test_copy_different_sizes_raise(grad, state, message):
    with pytest.raises(ValueError, match=message):
        kernel.copy(torch.zeros(8), grad, [state])


def test_copy_of_nothing_raises():
    with pytest.raises(ValueError, match="no elements"):
        kernel.copy(torch.zeros(0), torch.zeros(0), [])
