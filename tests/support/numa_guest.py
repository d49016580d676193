# SPDX-License-Identifier: Apache-2.0
"""Print on which nodes the pages of states are, on a machine of two with a processor at each."""

import ctypes
import json
import math
import mmap
import os
import sys
from itertools import groupby
from types import SimpleNamespace
from unittest import mock

import torch

from zero8 import Adam8bitBlockwise
from zero8.environment.host_memory import Placement
from zero8.state import store

_MOVE_PAGES = 279  # linux/unistd.h of x86-64


def nodes(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return (node, number of pages) along the whole pages of a state's codes."""
    (state,) = optimizer.state.values()
    x = state["exp_avg_q8"]
    first, end = -(-x.data_ptr() // mmap.PAGESIZE), (x.data_ptr() + x.nbytes) // mmap.PAGESIZE
    pages = (ctypes.c_void_p * (end - first))(*(at * mmap.PAGESIZE for at in range(first, end)))
    status, count = (ctypes.c_int * len(pages))(), ctypes.c_long(len(pages))
    # Without nodes to move to, it tells where they are.
    assert ctypes.CDLL(None).syscall(_MOVE_PAGES, 0, count, pages, None, status, 0) == 0
    return [(node, len(list(same))) for node, same in groupby(status)]


def untouched(value: float, *shape: int, dtype=torch.float32, **_) -> torch.Tensor:
    """Return zeros that a step is the first to write, in the place of values."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + 1, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def stepped() -> Adam8bitBlockwise:
    """Return an optimizer after a step."""
    p = torch.nn.Parameter(torch.zeros(1024, 4096))
    p.grad = torch.ones_like(p)
    optimizer = Adam8bitBlockwise([p], weight_decay=0.0)
    optimizer.step()
    return optimizer


# Optimizers would import it, which takes minutes there.
torch._dynamo = sys.modules["torch._dynamo"] = SimpleNamespace(disable=lambda call, *_, **__: call)
made = stepped()
found: dict[str, list] = {"made": nodes(made)}
with mock.patch.object(store, "_filled", untouched):
    found["stepped"] = nodes(stepped())
loaded = Adam8bitBlockwise(made.param_groups[0]["params"], weight_decay=0.0)
loaded.load_state_dict(made.state_dict())
found["loaded"] = nodes(loaded)
found["placed"] = [Placement.of(processors, []) for processors in ({0, 1}, {1})]
os.sched_setaffinity(0, {1})
torch.set_num_threads(1)
found["bound"] = nodes(stepped())
print("found", json.dumps(found))
