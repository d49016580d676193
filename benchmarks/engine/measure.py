# SPDX-License-Identifier: Apache-2.0
"""Times the steps of engines in turns, and the optimizer's step inside."""

import gc
import random
import statistics
import time
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.engine.contenders import CONTENDERS, Contender
from benchmarks.engine.engines import Case
from benchmarks.engine.sent import sent_by
from benchmarks.step.timing import WARM_UP_ROUNDS


class Clocked:
    """An engine, and the times of its steps in ms.

    Attributes:
        phase_ms: of the engine's step.
        inner_ms: of the optimizer's step within, summed over its calls.
        sent_bytes: sent by this rank in the engine's step, after `count`.
    """

    def __init__(self, contender: Contender, case: Case):
        """Make the engine."""
        self.contender = contender
        self.phase_ms: list[float] = []
        self.inner_ms: list[float] = []
        self.sent_bytes = 0
        self._engine = contender.make(case)
        self._inner = 0.0
        self._watch(self._engine.base_optimizer)

    def step(self) -> None:
        """Run a forward and a backward, and time the step."""
        self._engine.backward()
        self._inner, began = 0.0, _now()
        self._engine.step()
        self.phase_ms.append(1e3 * (_now() - began))
        self.inner_ms.append(1e3 * self._inner)

    def count(self) -> None:
        """Run a forward, a backward and a step that is not timed."""
        self._engine.backward()
        self.sent_bytes = sent_by(self._engine.step)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()
        del self._engine

    def _watch(self, optimizer: Any) -> None:
        step = optimizer.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                self._inner += time.perf_counter() - began

        optimizer.step = timed


def _now() -> float:
    """Return the time in s after a GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(case: Case, rounds: int) -> list[dict]:
    """Return a row per contender; all step in turns, in a new order each round."""
    contenders = CONTENDERS[case.algorithm][case.engine]
    clocks = [Clocked(contender, case) for contender in contenders]
    order, shuffle = list(clocks), random.Random(0).shuffle
    gc.collect()
    for _ in tqdm(range(WARM_UP_ROUNDS + rounds), desc=case.engine, unit="round"):
        shuffle(order)
        for clock in order:
            clock.step()
    for clock in clocks:
        clock.count()
    for clock in clocks:
        clock.close()
    gc.collect()
    phases = {clock.contender.name: clock.phase_ms[WARM_UP_ROUNDS:] for clock in clocks}
    return [_row(case, clock, phases) for clock in clocks]


def _row(case: Case, clock: Clocked, phases: dict[str, list[float]]) -> dict:
    contender = clock.contender
    mine = phases[contender.name]
    phase_ms, inner_ms = statistics.median(mine), statistics.median(clock.inner_ms[WARM_UP_ROUNDS:])
    tenths = statistics.quantiles(mine, n=10, method="inclusive")
    # Of the same rounds, as the speed of memory drifts.
    ratio = statistics.median(b / m for b, m in zip(phases[contender.over], mine, strict=True))
    return {
        "engine": case.engine,
        "clipping": case.clipping,
        "name": contender.name,
        "phase_ms": phase_ms,
        "phase_ms_p10": tenths[0],
        "phase_ms_p90": tenths[-1],
        "inner_ms": inner_ms,
        "sent_bytes": clock.sent_bytes / case.numel,
        "over": contender.over,
        "ratio": ratio,
    }
