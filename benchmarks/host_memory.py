# SPDX-License-Identifier: Apache-2.0
"""Trains a model of a given size with a DeepSpeed config, and compares its memory with the plan.

One process, which without a GPU also holds what would be there: its peak is compared with the sum
of both.  The model is a chain of square layers whose activations are small.  Writes OUT (JSON) and
a table (.md) beside it.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero8.bench import record
from zero8.bench.engine.contenders import join_ranks
from zero8.plan.memory import rows_of
from zero8.plan.model import Model
from zero8.plan.setup import Setup, with_deepspeed_config

GIB = 2**30
WIDTH = 4096
TOKENS = 16
LR = 2e-5


class Chain(nn.Module):
    """Square layers with a tanh between them."""

    def __init__(self, layers: int, width: int):
        """Make the layers."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def measure(config: dict[str, Any], numel: int, steps: int, width: int = WIDTH) -> dict[str, Any]:
    """Train, and return the planned and the measured bytes, and the times of steps."""
    import deepspeed

    join_ranks()
    before = _peak_bytes()
    layers = numel // width**2
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Chain(layers, width)
    engine = deepspeed.initialize(model=model, config=config)[0]
    x = torch.randn(TOKENS, width, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    losses, step_ms = [], []
    for _ in range(steps):
        loss = engine(x)
        engine.backward(loss)
        began = time.perf_counter()
        engine.step()
        step_ms.append(1e3 * (time.perf_counter() - began))
        losses.append(loss.item())
    shapes = tuple((f"layers.{k}.weight", (width, width)) for k in range(layers))
    setup = with_deepspeed_config(Setup(), config)
    rows = rows_of(Model("", shapes), setup)
    return {
        "numel": layers * width**2,
        "planned_bytes": {f"{row.place}, {row.what}": row.zero8_bytes for row in rows},
        "planned_fp32_adam_bytes": sum(row.fp32_bytes for row in rows),
        "peak_bytes": _peak_bytes() - before,
        "losses": losses,
        "step_ms": step_ms,
    }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def markdown(result: dict) -> str:
    """Return the table of a result."""
    rows = [f"| {what} | {n / GIB:.2f} |" for what, n in result["planned_bytes"].items() if n]
    planned = sum(result["planned_bytes"].values())
    times = ", ".join(f"{ms:,.0f}" for ms in result["step_ms"])
    lines = [
        f"# Memory of {result['numel']:,} parameters in one process",
        "",
        f"`{result['command']}`, commit {result['commit'] or 'unknown'}; {result['cpu']}, "
        f"{result['machine']['cores']} cores, {result['memory_bytes'] / GIB:.1f} GiB.",
        "",
        "| | GiB |",
        "| --- | ---: |",
        *rows,
        f"| **planned** | **{planned / GIB:.2f}** |",
        f"| **peak of the process, without what it held before** | "
        f"**{result['peak_bytes'] / GIB:.2f}** |",
        f"| planned with DeepSpeed's Adam | {result['planned_fp32_adam_bytes'] / GIB:.2f} |",
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
    config = json.loads(arguments.config.read_text())
    config["train_micro_batch_size_per_gpu"] = 1
    # A scheduler's first steps would be too small to be seen in three losses.
    config.pop("scheduler", None)
    config["optimizer"]["params"]["lr"] = LR
    machine = record.machine()
    result = measure(config, int(arguments.numel), arguments.steps)
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    options = f"--config {arguments.config} --numel {arguments.numel:g} --steps {arguments.steps}"
    result |= {
        "command": f"python -m benchmarks.host_memory {options} --json {arguments.json}",
        "commit": record.commit(),
        "cpu": record.cpu(),
        "machine": machine,
        "memory_bytes": total,
        "versions": record.versions(),
    }
    print(*record.write(result, arguments.json, markdown))


if __name__ == "__main__":
    main()
