# SPDX-License-Identifier: Apache-2.0
"""Measures training loops in turns: live gradients and times, with steps in the backward or after.

All loops start with the same weights and get the same batches.
"""

import copy
import operator
import resource
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero8 import Adam8bitBlockwise
from zero8.bench.step.timing import WARM_UP_ROUNDS, Samples, Timed, interleaved

# Few rows to a batch: the step, which reads every weight once, is a large part of an iteration.
BATCH = 8
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

PLAIN, IN_BACKWARD, TORCH = "zero8, plain loop", "zero8, in the backward", "torch, plain loop"


class GradientCount:
    """Counts the bytes of live gradients whenever a new one arrives.

    Its hooks must be registered before the step's, which free the gradients.
    """

    def __init__(self, params: Iterable[Tensor]):
        """Start counting."""
        self.peak_bytes = 0
        self._grads: list[weakref.ref[Tensor]] = []
        for p in params:
            p.register_post_accumulate_grad_hook(self._arrived)

    def take_peak_bytes(self) -> int:
        """Return the largest count since the last call."""
        peak_bytes, self.peak_bytes = self.peak_bytes, 0
        return peak_bytes

    def _arrived(self, p: Tensor) -> None:
        # References keep them alive during the count, as another thread frees them.
        alive = [grad for ref in self._grads if (grad := ref()) is not None] + [p.grad]
        self._grads = [weakref.ref(grad) for grad in alive]
        self.peak_bytes = max(self.peak_bytes, sum(grad.nbytes for grad in alive))


class Iteration(NamedTuple):
    """The measurements of an iteration, besides its wall time.

    Attributes:
        step_ns: wall time of `step()` itself.
        peak_bytes: the largest total of live gradients.
        cpu_ms: CPU time of all threads.
        page_faults: minor page faults.
    """

    step_ns: int
    peak_bytes: int
    cpu_ms: float
    page_faults: int


class Loop:
    """A training loop, and its iterations so far."""

    def __init__(self, model: nn.Sequential, optimizer: torch.optim.Optimizer):
        """Take a model of this loop's own, and its optimizer."""
        self.model = model
        self.optimizer = optimizer
        self.iterations: list[Iteration] = []
        self._count = GradientCount(model.parameters())
        self._batches = torch.Generator().manual_seed(1)

    def iterate(self) -> None:
        """Run a forward, a backward and a step."""
        before = _used()
        inputs = torch.randn(BATCH, self.model[0].in_features, generator=self._batches)
        nn.functional.mse_loss(self.model(inputs), inputs).backward()
        began = time.perf_counter_ns()
        self.optimizer.step()
        step_ns = time.perf_counter_ns() - began
        self.optimizer.zero_grad()
        used = map(operator.sub, _used(), before)
        self.iterations.append(Iteration(step_ns, self._count.take_peak_bytes(), *used))


def _used() -> tuple[float, int]:
    """Return the CPU time in ms and the page faults of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (usage.ru_utime + usage.ru_stime), usage.ru_minflt


def loops(hidden: int, layers: int) -> dict[str, Loop]:
    """Return the loops by the names of their rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))

    def loop(optimizer: Callable[..., torch.optim.Optimizer]) -> Loop:
        own = copy.deepcopy(model)
        return Loop(own, optimizer(own.parameters(), **HYPER))

    found = {
        PLAIN: loop(Adam8bitBlockwise),
        IN_BACKWARD: loop(Adam8bitBlockwise),
        TORCH: loop(lambda params, **hyper: torch.optim.AdamW(params, fused=True, **hyper)),
    }
    found[IN_BACKWARD].optimizer.step_in_backward(found[IN_BACKWARD].model)
    return found


def measure(hidden: int, layers: int, steps: int) -> list[dict]:
    """Return a row per loop.

    Raises:
        RuntimeError: if steps in the backward and after it lead to different weights.
    """
    found = loops(hidden, layers)
    samples = interleaved([Timed(loop.iterate) for loop in found.values()], steps)
    check_equal(found[PLAIN].model, found[IN_BACKWARD].model)
    return [_row(name, found[name], timed) for name, timed in zip(found, samples, strict=True)]


def check_equal(model: nn.Module, other: nn.Module) -> None:
    """Raise RuntimeError unless two models have the same bits."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(p, q):
            raise RuntimeError(f"{name}: steps in the backward end with other weights than after")


def _row(name: str, loop: Loop, samples: Samples) -> dict:
    step_ns, peak_bytes, cpu_ms, page_faults = zip(*loop.iterations[WARM_UP_ROUNDS:], strict=True)
    return {
        "name": name,
        "peak_gradient_bytes": max(peak_bytes),
        "peak_gradient_bytes_median": statistics.median(peak_bytes),
        **spread_ms("step", step_ns),
        **spread_ms("iteration", samples.times),
        "cpu_ms": statistics.median(cpu_ms),
        "page_faults": statistics.median(page_faults),
        "waited_share": samples.waited_ns / (torch.get_num_threads() * sum(samples.times)),
    }


def spread_ms(what: str, times_ns: Sequence[float]) -> dict[str, float]:
    """Return median, and 10th and 90th percentile of times, in ms."""
    tenths = statistics.quantiles(times_ns, n=10, method="inclusive")
    values = {
        f"{what}_ms": statistics.median(times_ns),
        f"{what}_ms_p10": tenths[0],
        f"{what}_ms_p90": tenths[-1],
    }
    return {key: value / 1e6 for key, value in values.items()}
