# SPDX-License-Identifier: Apache-2.0
"""Measure how much of ZeRO-3's optimizer step `"step_in_forward"` hides behind the next forward.

The forward is simulated: each layer sleeps, as a host does while an accelerator computes, and the
whole forward sleeps some multiple of the time of `engine.step()`.  Weights, gradients and
steps are real, on one rank.

Writes OUT (JSON), a table (.md) and a figure (.png) beside it.
"""

import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks import host_memory, record
from benchmarks.engine.engines import HYPERS, join_ranks
from zero8.bench import multiple
from zero8.spec.adam import ADAM

MODULE = "benchmarks.engine.in_forward"
RATIOS = (0.5, 1.0, 2.0, 4.0)
BLOCKS, ITERATIONS = 3, 6
COLUMNS = {
    "forward : step": ("ratio", "{:g}"),
    "forward, ms": ("forward_ms", "{:.1f}"),
    "step, ms": ("step_ms", "{:.1f}"),
    "both, ms": ("both_ms", "{:.1f}"),
    "both with step_in_forward, ms": ("behind_ms", "{:.1f}"),
    "step() returns after, ms": ("returns_ms", "{:.1f}"),
    "of the step hidden": ("hidden", "{:.0%}"),
}


class Pretends(torch.autograd.Function):
    """A layer that sleeps in the forward, and whose gradient is there at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grad: Tensor, seconds: float) -> Tensor:
        """Return a copy of the input."""
        time.sleep(seconds)
        ctx.grad = grad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradient that was given."""
        return outer[0], ctx.grad, None, None


class Layer(nn.Module):
    """A weight that is used, and the time that this takes."""

    def __init__(self, grad: Tensor):
        """Make it; its gradient is given."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn_like(grad, dtype=torch.float32))
        self.grad, self.sleep_s = grad, 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of the input."""
        return Pretends.apply(x, self.weight, self.grad, self.sleep_s)


class Run:
    """An engine whose iterations are timed."""

    def __init__(self, numel: int, layers: int, is_behind: bool):
        """Make it."""
        import deepspeed

        grad = torch.randn(numel // layers // 1024, 1024).bfloat16()
        self._model = nn.Sequential(*(Layer(grad) for _ in range(layers)))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam8bitBlockwise", "params": HYPERS[ADAM.name]},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()},
                "sub_group_size": numel // layers,
                "reduce_bucket_size": numel // layers,
            },
            "zero8": {"step_in_forward": is_behind},
            "steps_per_print": 10**9,
        }
        self._engine = deepspeed.initialize(model=self._model, config=config)[0]
        self._x = torch.ones(1, requires_grad=True, dtype=torch.bfloat16)

    def iterations(self, number: int, forward_s: float = 0.0) -> list[list[float]]:
        """Return the ms of the forward and the step, and both, in some iterations in a row."""
        for layer in self._model:
            layer.sleep_s = forward_s / len(self._model)
        found = []
        for _ in range(number):
            began = time.perf_counter()
            loss = self._engine(self._x)
            forward = time.perf_counter() - began
            self._engine.backward(loss.sum())
            began = time.perf_counter()
            self._engine.step()
            step = time.perf_counter() - began
            found.append([1e3 * forward, 1e3 * step, 1e3 * (forward + step)])
        self._engine.optimizer.optimizer.memory_report()  # waits
        return found[1:]  # nothing was behind the first forward


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the files, print the table; return the exit status."""
    made = record.parser(MODULE, __doc__)
    for name, default, text in (("numel", 2**26, "parameters"), ("layers", 32, "sub-groups")):
        number = partial(multiple, 1)
        made.add_argument(f"--{name}", type=number, default=default, help=f"{text}, {default}")
    asked = made.parse_args(argv)
    environment = record.environment(MODULE)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    peaks = []
    for is_behind in (False, True):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            peaks.append(process.submit(peak_bytes, asked.numel, asked.layers, is_behind).result())
    join_ranks()
    runs = [Run(asked.numel, asked.layers, is_behind) for is_behind in (False, True)]
    for run in runs:
        run.iterations(ITERATIONS)
    result = environment | {
        "numel": asked.numel,
        "layers": asked.layers,
        "threads": torch.get_num_threads(),
        "peak_bytes": peaks,
        "rows": [measure(*runs, ratio) for ratio in RATIOS],
    }
    title = f"The optimizer's step behind a simulated forward, {asked.numel:,} parameters"
    record.write(result, asked.json, markdown, title)
    record.write_png(figure_of(result), asked.json.with_suffix(".png"))
    print(*markdown(result), sep="\n")
    return 0


def measure(plain: Run, behind: Run, ratio: float) -> dict:
    """Return a row: the shortest times of blocks of iterations, in turns."""
    step_s = min(step for _, step, _ in plain.iterations(ITERATIONS)) / 1e3
    blocks: tuple[list, list] = ([], [])
    for _ in range(BLOCKS):
        for found, run in zip(blocks, (plain, behind), strict=True):
            found += run.iterations(ITERATIONS, ratio * step_s)
    # The fastest, as other programs may run: a median would mix their times with ours.
    (forward, step, both), (_, returns, behind_ms) = (
        [min(one) for one in zip(*found, strict=True)] for found in blocks
    )
    return {
        "ratio": ratio,
        "forward_ms": forward,
        "step_ms": step,
        "both_ms": both,
        "behind_ms": behind_ms,
        "returns_ms": returns,
        "hidden": (both - behind_ms) / step,
    }


def peak_bytes(numel: int, layers: int, is_behind: bool) -> int:
    """Return the peak of the memory of this process, in which an engine trains."""
    join_ranks()
    run = Run(numel, layers, is_behind)
    run.iterations(2)
    host_memory.reset_peak()  # not what making an engine takes
    run.iterations(4, 0.1)
    return host_memory.peak_bytes()


def figure_of(result: dict) -> Figure:
    """Return bars of the forward and the step, one after the other and with step_in_forward."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes, rows = figure.subplots(), result["rows"]
    forward = [row["forward_ms"] for row in rows]
    exposed = [row["both_ms"] - row["forward_ms"] for row in rows]
    left = [max(0.0, row["behind_ms"] - row["forward_ms"]) for row in rows]
    for shift, steps, color, label in (
        (-0.2, exposed, "tab:blue", "step in the call"),
        (0.2, left, "tab:orange", "what is left of it with step_in_forward"),
    ):
        places = [number + shift for number in range(len(rows))]
        axes.bar(places, forward, 0.38, color="lightgray", label="forward" if shift < 0 else None)
        axes.bar(places, steps, 0.38, bottom=forward, color=color, label=label)
    axes.set_xticks(range(len(rows)), [f"{row['ratio']:g}" for row in rows])
    axes.set_xlabel("forward : step")
    axes.set_ylabel("ms")
    axes.set_title(f"Simulated forward, {result['numel']:,} parameters", fontsize=10)
    axes.legend()
    return figure


def markdown(result: dict) -> list[str]:
    """Return the lines of a result's table."""
    plain, behind = result["peak_bytes"]
    return [
        *record.table_of(result["rows"], COLUMNS),
        "",
        "Simulated: the layers of the forward sleep, as a host does while an accelerator computes; "
        "weights, gradients and steps are real. ZeRO-3 with CPU offload on one rank, clipped, "
        f"{result['layers']} layers with a sub-group each, {result['threads']} threads; each "
        f"time is the shortest of {BLOCKS * (ITERATIONS - 1)} iterations, in turns. Hidden is what "
        "both gain, of the step. "
        f"Peak of a process's memory: {plain / 2**20:.0f} MiB, with step_in_forward "
        f"{behind / 2**20:.0f} MiB.",
    ]


if __name__ == "__main__":
    sys.exit(main())
