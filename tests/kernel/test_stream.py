# SPDX-License-Identifier: Apache-2.0
"""The loop that moves the memory of a step: it reaches every byte, and changes none."""

import json
import signal

import pytest
import torch

from zero8 import bench

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
    bench.copy(param, grad, moments, threads)
    assert all(map(torch.equal, framed, before))


PROTECTED = """
import ctypes, json, mmap, os
import torch
from zero8 import bench
from zero8.op import kernel

PAGES = 8
mprotect = ctypes.CDLL(None).mprotect

def copy(protected, page):
    maps = [mmap.mmap(-1, PAGES * mmap.PAGESIZE) for _ in range(4)]
    tensors = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
    address = tensors[protected].data_ptr() + page * mmap.PAGESIZE
    assert mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ) == 0
    bench.copy(tensors[0], tensors[1], tensors[2:], 2)
    os._exit(0)

kernel.module()
statuses = []
for number in range(4):
    for page in (0, PAGES - 1):
        process = os.fork()
        if not process:
            try:
                copy(number, page)
            finally:
                os._exit(1)
        statuses.append([number, page, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])])
print(json.dumps(statuses))
"""


def test_copy_writes_every_array_but_the_gradient(forks):
    """A process that writes to a page it may only read is killed."""
    done = forks.run(PROTECTED)
    assert done.returncode == 0, done.stderr
    arrays = ["param", "grad", "exp_avg", "exp_avg_sq"]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [number, page, 0 if array == "grad" else -signal.SIGSEGV]
        for number, array in enumerate(arrays)
        for page in (0, 7)
    ], done.stderr


@pytest.mark.parametrize(
    ("grad", "state", "message"),
    [
        (torch.zeros(8), torch.zeros(9), "different numbers of elements"),
        (torch.zeros(7), torch.zeros(8), "different numbers of elements"),
    ],
)
def test_copy_different_sizes_raise(grad, state, message):
    with pytest.raises(ValueError, match=message):
        bench.copy(torch.zeros(8), grad, [state])


def test_copy_of_nothing_raises():
    with pytest.raises(ValueError, match="no elements"):
        bench.copy(torch.zeros(0), torch.zeros(0), [])
