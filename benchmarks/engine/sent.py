# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a rank sends in collectives of torch.distributed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

ALL_GATHER, ALL_TO_ALL, ALL_REDUCE = "_allgather_base_", "alltoall_base_", "allreduce_"


class Sent(TorchDispatchMode):
    """Counts while it is entered, on the default group or on groups of all ranks.

    An all-gather sends a rank's tensor to every other rank, an all-to-all its parts but the rank's
    own, and a ring's all-reduce a tensor twice, but for the rank's part.

    Attributes:
        num_bytes: sent so far.

    Raises:
        NotImplementedError: by a collective of another kind.
    """

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count a collective, and call what was called."""
        if func.namespace == "c10d":
            self.num_bytes += _sent(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Sequence[Any]) -> int:
    others = distributed.get_world_size() - 1
    if name == ALL_GATHER:
        return others * args[1].nbytes
    if name == ALL_TO_ALL:
        x, sizes = args[1], args[4]
        own = sizes[distributed.get_rank()] if sizes else x.shape[0] // (others + 1)
        return x.nbytes - own * x[:1].nbytes
    if name == ALL_REDUCE:
        return sum(2 * others * x.nbytes // (others + 1) for x in args[0])
    raise NotImplementedError(f"{name}: the bytes of this collective are not counted")


def sent_by(step: Any) -> int:
    """Return the bytes that this rank sends in a call, 0 without other ranks."""
    with torch.no_grad(), Sent() as sent:
        step()
    return sent.num_bytes
