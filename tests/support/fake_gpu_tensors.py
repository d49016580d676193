# SPDX-License-Identifier: Apache-2.0
"""A pretended GPU: tensors that claim the device "gpu:0" and do not mix with others.

Their values are on the CPU.  As on a GPU, an operation on tensors of both devices raises, but for
copies and for tensors of no dimension; copies across are noted.  Importing this changes torch for
the rest of the process.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("gpu")

aten = torch.ops.aten
DEVICE = torch.device("gpu:0")
COPIES = (aten.copy_.default, aten._to_copy.default)

crossings: list[int] = []
"""Of each copy between the devices, in either direction, how many elements it had."""


class Gpu(torch.Tensor):
    """A tensor on the pretended GPU; `raw` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, **layout, dtype=raw.dtype, device=DEVICE
        )
        self.raw = raw
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
            return out
        leaves = tree_leaves((args, kwargs))
        ours = {id(x.raw): x for x in leaves if isinstance(x, Gpu)}
        others = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Gpu)]
        if func not in COPIES and any(x.dim() for x in others):
            raise RuntimeError(f"{func}: got tensors on {DEVICE} and on the CPU")
        device = kwargs.get("device")
        leaves_gpu = device is not None and torch.device(device).type != DEVICE.type
        if leaves_gpu or (func in COPIES and others):
            crossings.append(next(iter(ours.values())).numel())
        if device is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        raw_args, raw_kwargs = tree_map_only(Gpu, lambda x: x.raw, (args, kwargs))
        out = func(*raw_args, **raw_kwargs)
        if leaves_gpu or (others and func is aten.copy_.default and not isinstance(args[0], Gpu)):
            return out
        return tree_map_only(torch.Tensor, lambda x: ours[id(x)] if id(x) in ours else Gpu(x), out)

    def tolist(self):
        return self.raw.tolist()

    def __repr__(self):
        return f"Gpu({self.raw})"

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), Gpu(self.raw.clone()))


def _kernel(name):
    return torch.library.impl(f"aten::{name}", "PrivateUse1")


@_kernel("empty.memory_format")
def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Gpu(torch.empty(size, dtype=dtype, device="cpu"))


@_kernel("empty_strided")
def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return Gpu(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


@_kernel("arange.start_step")
def _arange(start, end, step=1, dtype=None, layout=None, device=None, pin_memory=None):
    return Gpu(torch.arange(start, end, step, dtype=dtype, device="cpu"))
