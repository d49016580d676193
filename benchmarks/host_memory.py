# SPDX-License-Identifier: Apache-2.0
"""Trains a model of a given size with a DeepSpeed config, and compares its memory with the plan.

One process, which without a GPU also holds what would be there: its peak is compared with the sum
of both.  The model is a chain of square layers whose activations are small.  Writes OUT (JSON) and
a table (.md) beside it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.engine.engines import join_ranks
from benchmarks.step.timing import peak_extra_bytes
from zero8.plan.deepspeed_config import with_deepspeed_config
from zero8.plan.memory import rows_of
from zero8.plan.model import Model
from zero8.plan.report import GIB
from zero8.plan.setup import Setup

WIDTH = 4096
LR = 1e-6


class Layer(nn.Linear):
    """A layer for one token: products of bfloat16 matrices are slow on many processors."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with a vector."""
        return torch.mv(self.weight, x)


class Chain(nn.Module):
    """Square layers with a tanh between them."""

    def __init__(self, layers: int, width: int):
        """Make the layers."""
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def measure(config: dict[str, Any], numel: int, steps: int, width: int = WIDTH) -> dict[str, Any]:
    """Train, and return the planned and the measured bytes, and the times of steps.

    Raises:
        RuntimeError: if the system does not count the peak of a process's memory.
    """
    # A scheduler's first steps would be too small to be seen in three losses.
    config = {key: value for key, value in config.items() if key != "scheduler"}
    config["train_micro_batch_size_per_gpu"] = 1
    config["optimizer"]["params"]["lr"] = LR
    layers = numel // width**2
    shapes = tuple((f"layers.{k}.weight", (width, width)) for k in range(layers))
    rows = rows_of(Model("", shapes), with_deepspeed_config(Setup(), config))
    taken: list[tuple[float, float]] = []
    peak = peak_extra_bytes(lambda: taken.extend(train(config, layers, steps, width)))
    if peak is None:
        raise RuntimeError("this system does not count the peak of a process's memory")
    return {
        "numel": layers * width**2,
        "planned_bytes": {f"{row.place}, {row.what}": row.zero8_bytes for row in rows},
        "planned_fp32_adam_bytes": sum(row.fp32_bytes for row in rows),
        "peak_bytes": peak,
        "losses": [loss for loss, _ in taken],
        "step_ms": [ms for _, ms in taken],
    }


def train(config: dict[str, Any], layers: int, steps: int, width: int) -> list[tuple[float, float]]:
    """Return for each step its loss, and the time of `engine.step()` in ms."""
    import deepspeed

    join_ranks()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Chain(layers, width)
    engine = deepspeed.initialize(model=model, config=config)[0]
    x = torch.randn(width, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    taken = []
    for _ in range(steps):
        loss = engine(x)
        engine.backward(loss)
        began = time.perf_counter()
        engine.step()
        taken.append((loss.item(), 1e3 * (time.perf_counter() - began)))
    return taken


def markdown(result: dict) -> str:
    """Return the table of a result."""

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / GIB:.2f}"

    planned = result["planned_bytes"]
    rows = [[what, gib(num_bytes)] for what, num_bytes in planned.items() if num_bytes]
    peak = "**peak of the process, without what it held before**"
    rows += [
        ["**planned**", f"**{gib(sum(planned.values()))}**"],
        [peak, f"**{gib(result['peak_bytes'])}**"],
        ["planned with DeepSpeed's Adam", gib(result["planned_fp32_adam_bytes"])],
    ]
    times = ", ".join(f"{ms:,.0f}" for ms in result["step_ms"])
    lines = [
        f"# Memory of {result['numel']:,} parameters in one process",
        "",
        f"`{result['command']}`, commit {result['commit'] or 'unknown'}; {result['cpu']}, "
        f"{result['machine']['cores']} cores, {result['memory_bytes'] / GIB:.1f} GiB.",
        "",
        *record.table_lines(["", "GiB"], rows),
        "",
        f"Losses of the steps: {', '.join(f'{loss:.4f}' for loss in result['losses'])}; "
        f"`engine.step()` took {times} ms.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_memory", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="of DeepSpeed")
    parser.add_argument("--numel", type=float, required=True, help="parameters")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    arguments = parser.parse_args()
    machine, config = record.machine(), json.loads(arguments.config.read_text())
    result = measure(config, int(arguments.numel), arguments.steps)
    options = f"--config {arguments.config} --numel {arguments.numel:g} --steps {arguments.steps}"
    result |= {
        "command": f"python -m benchmarks.host_memory {options} --json {arguments.json}",
        "commit": record.commit(),
        "cpu": record.cpu(),
        "machine": machine,
        "memory_bytes": psutil.virtual_memory().total,
        "versions": record.versions(),
    }
    print(*record.write(result, arguments.json, markdown))


if __name__ == "__main__":
    main()
