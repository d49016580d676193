# SPDX-License-Identifier: Apache-2.0
"""The plain tensors of an optimizer's state."""

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the storages of an optimizer's state; shared ones count once."""
    storages = (t.untyped_storage() for t in plain_tensors(list(optimizer.state.values())))
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def plain_tensors(value: object) -> Iterator[Tensor]:
    """Yield the plain tensors inside containers and wrapper subclasses."""
    if hasattr(value, "__tensor_flatten__"):
        yield from plain_tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from plain_tensors(item)
    elif hasattr(value, "quantized"):  # FlashOptim's, which are not tensors
        yield from plain_tensors([value.quantized, value.scales])
