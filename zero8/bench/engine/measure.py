# SPDX-License-Identifier: Apache-2.0
"""Times `engine.step()` of engines in turns, and the optimizer's step inside."""

import gc
import random
import statistics
import time
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from zero8.bench.engine.contenders import CONTENDERS, DEEPSPEED, DEEPSPEED_BF16, Contender, engine
from zero8.bench.step.timing import WARM_UP_ROUNDS


class Case(NamedTuple):
    """The settings that engines in turns have in common."""

    stage: int
    clipping: float


class Clocked:
    """An engine, and the times of its steps in ms.

    Attributes:
        phase_ms: of `engine.step()`.
        inner_ms: of the optimizer's step within, summed over its calls.
    """

    def __init__(self, contender: Contender, case: Case, numel: int):
        """Make the engine."""
        self.contender = contender
        self.phase_ms: list[float] = []
        self.inner_ms: list[float] = []
        self._engine = engine(contender, *case, numel)
        self._inner = 0.0
        self._watch(self._engine.optimizer.optimizer)

    def step(self) -> None:
        """Run a forward and a backward, and time the step."""
        self._engine.backward(self._engine())
        self._inner, began = 0.0, _now()
        self._engine.step()
        self.phase_ms.append(1e3 * (_now() - began))
        self.inner_ms.append(1e3 * self._inner)

    def close(self) -> None:
        """Free the engine."""
        self._engine.destroy()
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


def measure(case: Case, numel: int, rounds: int) -> list[dict]:
    """Return a row per contender; all step in turns, in a new order each round."""
    clocks = [Clocked(contender, case, numel) for contender in CONTENDERS]
    order, shuffle = list(clocks), random.Random(0).shuffle
    gc.collect()
    for _ in tqdm(range(WARM_UP_ROUNDS + rounds), desc=f"ZeRO-{case.stage}", unit="round"):
        shuffle(order)
        for clock in order:
            clock.step()
    for clock in clocks:
        clock.close()
    gc.collect()
    phases = {clock.contender.name: clock.phase_ms[WARM_UP_ROUNDS:] for clock in clocks}
    return [_row(case, clock, phases) for clock in clocks]


def _row(case: Case, clock: Clocked, phases: dict[str, list[float]]) -> dict:
    contender = clock.contender
    base = DEEPSPEED_BF16 if contender.masters == "bf16" else DEEPSPEED
    mine = phases[contender.name]
    phase_ms, inner_ms = statistics.median(mine), statistics.median(clock.inner_ms[WARM_UP_ROUNDS:])
    tenths = statistics.quantiles(mine, n=10, method="inclusive")
    # Of the same rounds, as the speed of memory drifts.
    ratio = statistics.median(b / m for b, m in zip(phases[base], mine, strict=True))
    return {
        "stage": case.stage,
        "clipping": case.clipping,
        "name": contender.name,
        "phase_ms": phase_ms,
        "phase_ms_p10": tenths[0],
        "phase_ms_p90": tenths[-1],
        "inner_ms": inner_ms,
        "over": base,
        "ratio": ratio,
    }
