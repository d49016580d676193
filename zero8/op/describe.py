# SPDX-License-Identifier: Apache-2.0
"""Describes many tensors at once: addresses, sizes, dtypes and devices.

Every step needs these of all parameters, gradients and states, and the previous step has evicted
the objects from the caches: one by one, this takes longer than the step of a small parameter.
"""

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.structs import MAX_HASHED, TENSOR, WITHOUT_MEMORY

Contents = tuple[object, list[Tensor | float]]
"""A description of some states without their tensors and numbers, and these entries."""


class Snapshot:
    """A snapshot of the addresses, sizes, dtypes and devices of parameters, gradients and states.

    Attributes:
        addresses: (2, parameters) uint64, of parameters and gradients.
    """

    def __init__(self, values: list[Tensor], grads: list[Tensor], contents: Contents):
        """Take a snapshot.

        Args:
            values: the local tensors of the parameters.
            grads: the gradients of `values`.
            contents: the contents of the parameters' states, `StateKind.contents`.
        """
        self._description, entries = contents
        self._count = len(values)
        self._records = described([*values, *grads, *entries])
        self.addresses = self._tensors["data"].copy()

    def addresses_if_same(
        self, values: list[Tensor], grads: list[Tensor], contents: Contents
    ) -> np.ndarray | None:
        """Return the present addresses of parameters and gradients, as `addresses`.

        Args:
            values: the local tensors of the same parameters.
            grads: the gradients of `values`.
            contents: the contents of their states.

        Returns:
            None if anything but these addresses has changed, so that records are invalid; also if a
            parameter or a gradient has no memory.
        """
        description, entries = contents
        if description != self._description:
            return None
        objects = [*values, *grads, *entries]
        addresses = addresses_if_same(objects, self._records, 2 * self._count)
        return None if addresses is None else addresses.reshape(2, -1)

    @property
    def contiguous(self) -> np.ndarray:
        """Whether parameters and gradients are contiguous; (2, parameters) bool."""
        return self._tensors["contiguous"].astype(bool)

    @property
    def devices(self) -> np.ndarray:
        """A number per parameter, equal for equal devices."""
        devices: np.ndarray = self._tensors["kind"][0] >> 32
        return devices

    @property
    def _tensors(self) -> np.ndarray:
        return self._records[: 2 * self._count].reshape(2, -1)


def described(objects: list[Tensor | float]) -> np.ndarray:
    """Return address, size, kind and contiguity of tensors, and a hash of small ones' contents.

    Numbers may be among them, as they are in states: separating them would take longer.

    Returns:
        (len(objects),) `TENSOR`.  `kind` is equal for equal dtype and device, its upper 32 bits for
        equal device; it is `WITHOUT_MEMORY` for tensors without memory of their own, such as sparse
        ones.  `contents` is equal for equal contents of int64 tensors in host memory of at most
        `MAX_HASHED` elements, such as a state's `format`; it is 0 for others.  The record of a
        number is contiguous, and otherwise 0.
    """
    records, api = np.empty(len(objects), TENSOR), _exchange_api()
    if api is None or not kernel.module().describe(api, Tensor, objects, records):
        for number, one in enumerate(objects):
            records[number] = _described(one)
    return records


def addresses_if_same(
    objects: list[Tensor | float], before: np.ndarray, num_addresses: int
) -> np.ndarray | None:
    """Return the addresses of the first objects, None if anything else has changed.

    Args:
        objects: tensors and numbers.
        before: the earlier result of `described` for them.
        num_addresses: the number of objects, from the first on, whose addresses may have changed.

    Returns:
        (num_addresses,) uint64.  None also if one of these has elements and no memory.
    """
    addresses, api = np.empty(num_addresses, np.uint64), _exchange_api()
    is_same = None
    if api is not None:
        is_same = kernel.module().describe_again(api, Tensor, objects, before, addresses)
    if is_same is None:
        is_same = _is_same(described(objects), before, addresses)
    return addresses if is_same else None


def _exchange_api() -> object:
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def _is_same(records: np.ndarray, before: np.ndarray, addresses: np.ndarray) -> bool:
    """Do the same as the op's `describe_again`, for torch before 2.10."""
    if len(records) != len(before):
        return False
    first = records[: len(addresses)]
    if ((first["data"] == 0) & (first["numel"] > 0)).any():
        return False
    addresses[:] = first["data"]
    first["data"] = before["data"][: len(addresses)]
    return records.tobytes() == before.tobytes()


def _described(one: Tensor | float) -> tuple[int, int, int, bool, int]:
    """Return one record, for torch before 2.10."""
    if not isinstance(one, Tensor):
        return 0, 0, 0, True, 0
    try:
        data = one.data_ptr()
    except RuntimeError:
        return 0, 0, WITHOUT_MEMORY, False, 0
    kind = (hash(one.device) & 0x7FFFFFFF) << 32 | hash(one.dtype) & 0xFFFFFFFF
    return data, one.numel(), kind, one.is_contiguous(), _contents_of(one)


def _contents_of(tensor: Tensor) -> int:
    is_hashed = tensor.dtype == torch.int64 and tensor.device.type == "cpu" and tensor.data_ptr()
    if not is_hashed or not tensor.is_contiguous() or tensor.numel() > MAX_HASHED:
        return 0
    return hash(tensor.numpy().tobytes())
