# SPDX-License-Identifier: Apache-2.0
"""Where tensors are and of what kind, of many tensors at once.

A step asks this of every parameter, gradient and state, and the step before has driven the objects
out of the caches: one by one, that takes longer than the step of a small parameter.
"""

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.structs import MAX_HASHED, TENSOR, WITHOUT_MEMORY

Contents = tuple[object, list[Tensor | float]]
"""What describes some states beside tensors and numbers, and these."""


class Seen:
    """Where parameters, gradients and states were when they were looked at, and of what kind.

    Attributes:
        addresses: (2, parameters) uint64, of parameters and gradients.
    """

    def __init__(self, values: list[Tensor], grads: list[Tensor], contents: Contents):
        """Look at parameters.

        Args:
            values: what this rank holds of them.
            grads: of the values.
            contents: of their states, from the kinds of these.
        """
        self._description, entries = contents
        self._count = len(values)
        self._records = described([*values, *grads, *entries])
        self.addresses = self._tensors["data"].copy()

    def again(
        self, values: list[Tensor], grads: list[Tensor], contents: Contents
    ) -> np.ndarray | None:
        """Return where parameters and gradients are now: `addresses`.

        Args:
            values: of the same parameters.
            grads: of the values.
            contents: of their states.

        Returns:
            None unless all else is as it was, so that the same records fit; also where a parameter
            or a gradient has no memory.
        """
        description, entries = contents
        if description != self._description:
            return None
        objects = [*values, *grads, *entries]
        addresses = addresses_if_same(objects, self._records, 2 * self._count)
        return None if addresses is None else addresses.reshape(2, -1)

    @property
    def contiguous(self) -> np.ndarray:
        """Whether the elements of parameters and gradients lie in order; (2, parameters) bool."""
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
    """Return address, number of elements, kind and contiguity of tensors, and what small ones say.

    Numbers may be among them, as they are in states: asking which is what would take longer.

    Returns:
        (len(objects),) `TENSOR`.  `kind` is equal for equal dtype and device, its upper 32 bits for
        equal device; it is `WITHOUT_MEMORY` for tensors that have none of their own, such as sparse
        ones.  `contents` is equal for equal contents of int64 tensors in host memory of at most
        `MAX_HASHED` elements, as those that describe states are; it is 0 for others.  A number is
        contiguous, and otherwise 0.
    """
    records, api = np.empty(len(objects), TENSOR), _exchange_api()
    if api is None or not kernel.module().describe(api, Tensor, objects, records):
        for number, one in enumerate(objects):
            records[number] = _described(one)
    return records


def addresses_if_same(
    objects: list[Tensor | float], before: np.ndarray, num_addresses: int
) -> np.ndarray | None:
    """Return the addresses of the first objects, None unless all else is as it was described.

    Args:
        objects: as `described`.
        before: what `described` returned of them.
        num_addresses: how many of them, the first ones, may be elsewhere now.

    Returns:
        (num_addresses,) uint64.  None also where one of these has elements and no memory.
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
    """Do what `describe_again` does, for torch before 2.10."""
    if len(records) != len(before):
        return False
    first = records[: len(addresses)]
    if ((first["data"] == 0) & (first["numel"] > 0)).any():
        return False
    addresses[:] = first["data"]
    first["data"] = before["data"][: len(addresses)]
    return records.tobytes() == before.tobytes()


def _described(one: Tensor | float) -> tuple[int, int, int, bool, int]:
    """Return one record, as torch before 2.10 can tell it."""
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
