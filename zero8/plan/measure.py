# SPDX-License-Identifier: Apache-2.0
"""Measures this machine: bandwidth of its memory, and ns per parameter of one core."""

from collections.abc import Callable

import torch

from zero8.bench.step import contenders
from zero8.bench.step.contenders import Contender
from zero8.bench.step.machines import Machine
from zero8.bench.step.timing import Samples, Timed, interleaved, threads
from zero8.bench.step.variants import BF16, FP32
from zero8.plan.rates import Rates
from zero8.spec.codec import DEFAULT_CODEC

NUMEL = 2**25
ROUNDS = 7


class Calibration:
    """The calls that `--measure` times, and their evaluation.

    They are steps of an fp32 Adam (PyTorch's fused AdamW) and of zero8 on one thread, and copies of
    the same memory on 1, 2, 4, ... and all threads.
    """

    def __init__(self, numel: int, num_threads: int):
        """Make the tensors and take first steps.

        Args:
            numel: parameters, a multiple of 4096; they should not fit in the cache.
            num_threads: number of all threads.
        """
        params = contenders.flat_params(numel)
        (adam,), _ = contenders.peer_contenders(["torch"], params)
        ours = contenders.zero8_contenders([DEFAULT_CODEC], params)
        by_variant = {contender.variant: contender for contender in ours}
        self._steps = (adam, by_variant[FP32.name], by_variant[BF16.name])
        self._copy = contenders.copies([adam])[adam.streams]
        self._counts = thread_counts(num_threads)
        self._numel = numel

    @property
    def timed(self) -> list[Timed]:
        """The calls to time in turns."""
        copies = [on_threads(self._copy, count) for count in self._counts]
        return [*(on_threads(step, 1) for step in self._steps), *copies]

    def result(self, times_ns: list[float]) -> tuple[Machine, Rates, dict[int, float]]:
        """Return the machine, its rates, and GB/s by number of threads; takes times of `timed`."""
        steps, copies = times_ns[: len(self._steps)], times_ns[len(self._steps) :]
        moved = self._copy.bytes_per_param * self._numel
        bandwidths = {n: moved / ns for n, ns in zip(self._counts, copies, strict=True)}
        machine = Machine("this one", self._counts[-1], max(bandwidths.values()))
        rates = Rates(*(ns / self._numel for ns in steps), source="measured on this machine")
        return machine, rates, bandwidths


def measure() -> tuple[Machine, Rates, dict[int, float]]:
    """Measure this machine, in a few seconds; see `Calibration.result`."""
    calibration = Calibration(NUMEL, torch.get_num_threads())
    samples = interleaved(calibration.timed, ROUNDS)
    return calibration.result([fastest_ns(one) for one in samples])


def fastest_ns(samples: Samples) -> float:
    """Return the shortest time: other load on the machine can only add to it."""
    return min(samples.times)


def thread_counts(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return sorted({1 << k for k in range(most.bit_length())} | {most})


def on_threads(contender: Contender, count: int) -> Timed:
    """Return a contender's step on `count` of torch's threads."""
    return Timed(_on_threads(contender.step, count))


def _on_threads(call: Callable[[], object], count: int) -> Callable[[], object]:
    def run():
        with threads(count):
            call()

    return run
