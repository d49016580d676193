# SPDX-License-Identifier: Apache-2.0
"""The times of an engine's step, and of the optimizer's step inside."""

import gc
import time
from typing import Any

import torch

from benchmarks.engine.engines import Engine
from benchmarks.engine.sent import sent_by


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
