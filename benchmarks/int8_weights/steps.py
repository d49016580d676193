# SPDX-License-Identifier: Apache-2.0
"""Time steps over one matrix of torchao's INT8 weights, beside float32 and bfloat16 weights.

Writes OUT (JSON) and a table (.md) beside it.  Needs torchao: pip install 'zero8[torchao]'.

Keys of the JSON object:
    versions, commit, cpu, workers, command, seconds, cpu_seconds: what was run; workers are cores.
    shape, rounds: of the matrix, and how often each step was timed.
    rows: one per number of threads and kind of weights, times in ns per parameter.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torchao.optim import AdamW8bit

from benchmarks.fidelity import runs
from benchmarks.int8_weights.kinds import KINDS, int8
from benchmarks.record import table_lines
from benchmarks.step.timing import Timed, interleaved, spread
from zero8.bench import threads
from zero8.optimizer import Adam8bitBlockwise

SHAPE = (4096, 8192)
ROUNDS = 21
SLOW_EVERY = 5
LR = 1e-4

ZERO8 = ("float32", "bfloat16, dither", "INT8, dither", "INT8, hash", "INT8, nearest")
TORCHAO = "INT8, torchao's AdamW8bit"


def measure(workers: int) -> dict:
    """Time all kinds with one thread and with one per core."""
    environment = runs.environment(workers)
    rows = [row for count in sorted({1, workers}) for row in step_rows(count)]
    return {"shape": SHAPE, "rounds": ROUNDS, "rows": rows, **environment}


def step_rows(num_threads: int) -> list[dict]:
    """Time a step of every kind, in turns; return a row for each."""
    with threads(num_threads):
        optimizers = {name: _zero8(name) for name in ZERO8} | {TORCHAO: _torchao()}
        for optimizer in optimizers.values():
            optimizer.step()
        timed = [
            Timed(optimizer.step, SLOW_EVERY if name == TORCHAO else 1)
            for name, optimizer in optimizers.items()
        ]
        samples = interleaved(timed, ROUNDS)
    numel = SHAPE[0] * SHAPE[1]
    return [
        {"threads": num_threads, "weights": name, **spread(one.times, numel)}
        for name, one in zip(optimizers, samples, strict=True)
    ]


def _zero8(name: str) -> Optimizer:
    kind = KINDS[name]
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    p = _with_gradient(kind.stored, dtype)
    return Adam8bitBlockwise([p], lr=LR, weight_decay=0.01, **kind.keywords)


def _torchao() -> Optimizer:
    optimizer: Optimizer = AdamW8bit([_with_gradient(int8, torch.bfloat16)], lr=LR, block_size=256)
    return optimizer


def _with_gradient(
    stored: Callable[[torch.Tensor], nn.Parameter], dtype: torch.dtype
) -> nn.Parameter:
    """Return a parameter that shows a dtype, with a gradient in it."""
    generator = torch.Generator().manual_seed(0)
    p = stored((torch.randn(SHAPE, generator=generator) * 0.02).to(dtype))
    p.grad = (torch.randn(SHAPE, generator=generator) * 1e-3).to(dtype)
    return p


def markdown(result: dict) -> str:
    """Return the table of a result."""
    return "\n".join(runs.section_lines(result, "Steps of INT8 weights", [_lines]))


def _lines(result: dict) -> list[str]:
    rows, columns = result["shape"]
    cells = [
        [
            str(row["threads"]),
            row["weights"],
            f"{row['ns_per_param']:.2f}",
            f"{row['ns_per_param_p10']:.2f} to {row['ns_per_param_p90']:.2f}",
        ]
        for row in result["rows"]
    ]
    return [
        f"Steps over a matrix of {rows} by {columns}, {result['rounds']} of each kind in turns "
        f"({TORCHAO}: every {SLOW_EVERY}th), by `Adam8bitBlockwise` with the default codec, and by "
        "torchao's optimizer with its own states. Gradients are in bfloat16, of float32 weights in "
        "float32; scales of rows are in bfloat16.",
        "",
        *table_lines(["threads", "weights", "median ns per parameter", "10 to 90 %"], cells),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    return runs.main("benchmarks.int8_weights.steps", __doc__, measure, markdown, argv)


if __name__ == "__main__":
    sys.exit(main())
