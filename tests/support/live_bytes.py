# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of tensors that operations make."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts, while it is on, the bytes of what operations have made and somebody still holds.

    Attributes:
        peak: the largest number so far.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._holders: dict[int, int] = {}  # of each storage by its address
        self._others: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._holders:
                self._others.add(x.untyped_storage().data_ptr())
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._hold(x)
        return out

    def _hold(self, x):
        storage = x.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or address in self._others:
            return
        if address not in self._holders:
            self._holders[address] = 0
            self._now += num_bytes
            self.peak = max(self.peak, self._now)
        self._holders[address] += 1
        weakref.finalize(x, self._let_go, address, num_bytes)

    def _let_go(self, address, num_bytes):
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self._now -= num_bytes
