# SPDX-License-Identifier: Apache-2.0
"""Whether gradients that repeat resonate with the dither, whose steps are the golden ratio's.

v is rounded with q(i, t) of equation (D2) of `zero8.spec.dither`, which moves by the golden ratio
from step to step.  Multiples of a Fibonacci number move that by little, so gradients that repeat
after so many steps could meet nearly the same threshold again and again, were the sequence not
shifted and turned round every 32 steps.  Whether errors add up is measured against the same code
with hashed, independent thresholds.

m is exact and v is that of the default codec, in plain PyTorch: errors are of v's rounding alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.training import BETA1
from zero8.spec import dither
from zero8.spec.codec import CODECS, DEFAULT_CODEC, dequantize, quantize
from zero8.spec.grid import BlockGrid

BETA2S = (0.9, 0.95, 0.99, 0.999, 0.9999)
PERIODS = (1, 2, 3, 5, 7, 8, 13, 21, 34, 55, 89)
# "spike": one large gradient in every period; "random": normal numbers, the same in every period.
PATTERNS = ("spike", "random")
# The element's index enters the threshold, so parameters have rows of many lengths, and as few
# elements as are kept in 8 bits.
WIDTHS = (64, 65, 255, 256, 1000)
MIN_NUMEL = 4096
BLOCK_SIZE = 256
EPS = 1e-8
# Ratio of the large gradient to the others.
CONTRAST = 30.0
NUMBERS = {
    "dithered": dither.in_blocks,
    "hashed": lambda phase, first, numel, grid: dither.hashed(phase, first, numel),
}


@dataclass(frozen=True)
class Member:
    """One parameter among those that are stepped together."""

    period: int
    width: int

    @property
    def grid(self) -> BlockGrid:
        """Its blocks."""
        return BlockGrid.of((-(-MIN_NUMEL // self.width), self.width), BLOCK_SIZE)

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.grid.num_rows * self.width

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.period}x{self.width}"

    @property
    def key(self) -> int:
        """The key of its thresholds, as the optimizer makes it with seed 0."""
        return dither.stream_key(0, dither.identity_of(self.name), "exp_avg_sq")

    @property
    def is_spike(self) -> Tensor:
        """Which elements follow the pattern "spike", [numel] bool: every other row."""
        return torch.arange(self.numel) // self.width % 2 == 0

    def gradients(self) -> Tensor:
        """Return one period of gradients, [period, numel] float32: noise-free, over 8 octaves."""
        generator = torch.Generator().manual_seed(10000 * self.period + self.width)
        sigma = torch.exp2(-8 * torch.rand(self.numel, generator=generator))
        spike = torch.full((self.period, self.numel), 1 / CONTRAST)
        spike[0] = 1.0
        random = torch.randn(self.period, self.numel, generator=generator)
        return torch.where(self.is_spike, spike, random) * sigma


MEMBERS = tuple(Member(period, width) for period in PERIODS for width in WIDTHS)


def block_numbers(members: tuple[Member, ...]) -> tuple[Tensor, int]:
    """Return the block of each element of parameters that lie one after the other, and how many."""
    blocks, total = [], 0
    for member in members:
        block, count = member.grid.block_numbers(0, member.numel)
        blocks.append(block + total)
        total += count
    return torch.cat(blocks), total


class Gradients:
    """The periodic gradients of parameters that lie one after the other."""

    def __init__(self, members: tuple[Member, ...]):
        """Draw them."""
        self._periods = [member.gradients() for member in members]

    def at(self, step: int) -> Tensor:
        """Return the flat gradients of a step."""
        return torch.cat([period[step % len(period)] for period in self._periods])


class RoundedSecondMoment:
    """v of many parameters, stored in the default codec's code after every step."""

    def __init__(self, members: tuple[Member, ...], beta2: float, numbers: Callable):
        """Begin at 0; `numbers` is a function of `zero8.spec.dither` that gives the thresholds."""
        self._members, self._beta2, self._numbers = members, beta2, numbers
        self._code = CODECS[DEFAULT_CODEC].of_unsigned
        self._block, self._num_blocks = block_numbers(members)
        self._store(torch.zeros(self._block.numel()), 0)

    def _store(self, v: Tensor, step: int) -> None:
        thresholds = torch.cat(
            [self._numbers(dither.phase_of(m.key, step), 0, m.numel, m.grid) for m in self._members]
        )
        self._codes, self._scales = quantize(
            self._code, v, self._block, self._num_blocks, thresholds
        )

    def step(self, grad: Tensor, step: int) -> Tensor:
        """Take flat gradients at a step, counted from 1; return v before it is rounded."""
        v = dequantize(self._code, self._codes, self._scales, self._block, self._beta2)
        v.addcmul_(grad, grad, value=1 - self._beta2)
        self._store(v, step)
        return v

    def stored(self) -> Tensor:
        """Return v as it is stored."""
        return dequantize(self._code, self._codes, self._scales, self._block)


class Errors:
    """Sums over steps, for every element: of u's errors, of exact u, and of v's errors."""

    def __init__(self, numel: int):
        """Start empty."""
        zeros = torch.zeros(5, numel, dtype=torch.float64)
        self._squares, self._sum, self._exact_squares, self._exact_sum, self._log_ratio = zeros
        self._samples = 0

    def add(self, error: Tensor, exact: Tensor, log_ratio: Tensor) -> None:
        """Add a step: the error of u, the exact u, and the log of stored over exact sqrt(v)."""
        self._squares.addcmul_(error, error)
        self._sum += error
        self._exact_squares.addcmul_(exact, exact)
        self._exact_sum += exact
        self._log_ratio += log_ratio
        self._samples += 1

    def rms(self, chosen: Tensor) -> float:
        """Return the error of u of some elements, in units of RMS(u)."""
        return (self._squares[chosen].sum() / self._exact_squares[chosen].sum()).sqrt().item()

    def result(self, chosen: Tensor) -> dict:
        """Return the metrics of some elements, as they are called in the main measurement."""
        return {
            "rms_update_error": self.rms(chosen),
            "drift": (self._sum[chosen].norm() / self._exact_sum[chosen].norm()).item(),
            "sqrt_v_bias": (self._log_ratio[chosen].mean() / self._samples).exp().item(),
        }


def simulate(
    members: tuple[Member, ...], beta2: float, steps: int, on_step: Callable[[], None]
) -> dict[str, Errors]:
    """Return the errors of the second half of the steps, per kind of thresholds."""
    gradients = Gradients(members)
    numel = sum(member.numel for member in members)
    m, v = torch.zeros(2, numel, dtype=torch.float64)
    moments = {kind: RoundedSecondMoment(members, beta2, f) for kind, f in NUMBERS.items()}
    errors = {kind: Errors(numel) for kind in NUMBERS}
    for step in range(1, steps + 1):
        grad = gradients.at(step)
        m.lerp_(grad.double(), 1 - BETA1)
        v.mul_(beta2).addcmul_(grad.double(), grad.double(), value=1 - beta2)
        exact = _update(m, v, beta2, step)
        for kind, moment in moments.items():
            update = _update(m, moment.step(grad, step), beta2, step)
            if step > steps // 2:
                log_ratio = 0.5 * (moment.stored() / v).log()
                errors[kind].add(update - exact, exact, log_ratio)
        on_step()
    return errors


def _update(m: Tensor, v: Tensor, beta2: float, step: int) -> Tensor:
    """Return Adam's u."""
    return m / (1 - BETA1**step) / ((v / (1 - beta2**step)).sqrt() + EPS)


def resonance(
    members: tuple[Member, ...], beta2: float, steps: int, on_step: Callable[[], None]
) -> list[dict]:
    """Return a row per period and pattern: both errors, their ratio, and the worst row length."""
    errors = simulate(members, beta2, steps, on_step)
    sizes = torch.tensor([member.numel for member in members])
    period = torch.tensor([member.period for member in members]).repeat_interleave(sizes)
    width = torch.tensor([member.width for member in members]).repeat_interleave(sizes)
    spike = torch.cat([member.is_spike for member in members])
    rows = []
    for each in period.unique().tolist():
        for pattern in PATTERNS:
            chosen = (period == each) & (spike == (pattern == "spike"))
            widths = width[chosen].unique().tolist()
            ratios = {w: _ratio(errors, chosen & (width == w)) for w in widths}
            worst = max(ratios, key=ratios.get)
            rows.append(
                {
                    "beta2": beta2,
                    "period": each,
                    "pattern": pattern,
                    "steps": steps,
                    **{kind: found.result(chosen) for kind, found in errors.items()},
                    "ratio": _ratio(errors, chosen),
                    "worst_width": worst,
                    "worst_width_ratio": ratios[worst],
                }
            )
    return rows


def _ratio(errors: dict[str, Errors], chosen: Tensor) -> float:
    return errors["dithered"].rms(chosen) / errors["hashed"].rms(chosen)


@dataclass(frozen=True)
class Resonance:
    """The measurement: `longest` limits the steps of each run."""

    longest: int

    def jobs(self) -> list[Job]:
        """Return a job per beta2, longest first."""
        return [
            Job(resonance, (MEMBERS, beta2, steps), steps)
            for beta2 in reversed(BETA2S)
            for steps in [steps_for(beta2, self.longest)]
        ]

    def result(self, results: dict[Job, list[dict]]) -> dict:
        """Return the rows of all jobs."""
        return {"resonance": [row for job in self.jobs() for row in results[job]]}


def steps_for(beta2: float, longest: int) -> int:
    """Return the steps of a run: three times the memory of v, within limits."""
    return min(longest, max(400, round(3 / (1 - beta2))))
