# SPDX-License-Identifier: Apache-2.0
"""Checks of the memory of tensors: kernels get only addresses and sizes."""

from collections.abc import Collection

import torch
from torch import Tensor


def check_entry(
    name: str,
    tensor: object,
    numel: int,
    dtypes: Collection[torch.dtype],
    device: torch.device | None = None,
    *,
    is_contiguous: bool = False,
) -> Tensor:
    """Return the tensor; raise ValueError unless it has this many elements in memory.

    Without a device any device that has memory is valid, and any strides unless `is_contiguous`.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}, expected a tensor")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected one of {list(dtypes)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected one on {device}")
    if tensor.is_meta:
        raise ValueError(f"{name}: got a tensor on meta, expected one with values")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: got layout {tensor.layout}, expected a dense tensor")
    if tensor.numel() != numel:
        raise ValueError(f"{name}: got {tensor.numel()} elements, expected {numel}")
    end = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + end) * tensor.element_size() if numel else 0
    if end_bytes > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"{name}: got a storage of {tensor.untyped_storage().nbytes()} bytes, expected at "
            f"least {end_bytes}"
        )
    if is_contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {tensor.stride()}, expected a contiguous tensor")
    return tensor


def check_apart(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if two contiguous tensors, given by their names, share memory."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes
    )
    for (device, begin, num_bytes, name), (other_device, other, _, other_name) in zip(
        spans, spans[1:], strict=False
    ):
        if device == other_device and begin + num_bytes > other:
            raise ValueError(f"{name} and {other_name} share memory, expected tensors of their own")
