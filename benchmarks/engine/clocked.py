# SPDX-License-Identifier: Apache-2.0
"""What is measured of an engine's step: times, and the bytes that a rank sends in it."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine.engines import Engine

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


class Clocked:
    """An engine whose steps are timed."""

    def __init__(self, engine: Engine):
        """Put a clock around the step of the engine's optimizer."""
        self._engine = engine
        self._inner_s = 0.0
        step = engine.base_optimizer.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                self._inner_s += time.perf_counter() - began

        engine.base_optimizer.step = timed

    def step(self) -> tuple[float, float]:
        """Run a forward and a backward, and step; return the engine's and the optimizer's ms."""
        self._engine.backward()
        self._inner_s, began = 0.0, _now()
        self._engine.step()
        return 1e3 * (_now() - began), 1e3 * self._inner_s

    def sent_bytes(self) -> int:
        """Run a forward, a backward and a step, and return the bytes that this rank sends in it."""
        self._engine.backward()
        return sent_by(self._engine.step)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
        del self._engine
        gc.collect()


def _now() -> float:
    """Return the time in s after a GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
