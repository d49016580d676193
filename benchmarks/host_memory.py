# SPDX-License-Identifier: Apache-2.0
"""Train a model of a given size with a DeepSpeed config, and compare its memory with the plan.

One process, which without a GPU also holds what would be there: its peak is compared with the sum
of both.  The model is a chain of square layers whose activations are small.  Writes OUT (JSON) and
a table (.md) beside it.  Needs Linux, which counts the peak of a process's memory.
"""

import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks import record
from zero8.checkpoint.commands.convert import convert
from zero8.plan.memory import rows_of
from zero8.plan.model import Model
from zero8.plan.setup import Setup, with_ds_config

MODULE = "benchmarks.host_memory"
WIDTH = 4096
LR = 1e-6
GIB = 2**30
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


class Layer(nn.Linear):
    """A layer for one token: products of bfloat16 matrices are slow on many processors."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x and the product with it."""
        return x + torch.tanh(torch.mv(self.weight, x))


def measure(
    config: dict[str, Any], numel: int, steps: int, width: int = WIDTH, folder: Path | None = None
) -> dict[str, Any]:
    """Train, and return the planned and the measured bytes, and the times of steps.

    With a folder, which must not exist, also the peaks of saving into it, and, each in a new
    process, of loading, converting for another number of ranks, and loading that.
    """
    # A scheduler's first steps would be too small to be seen in three losses.
    config = {key: value for key, value in config.items() if key != "scheduler"}
    config["train_micro_batch_size_per_gpu"] = 1
    config["optimizer"]["params"]["lr"] = LR
    layers = numel // width**2
    shapes = tuple((f"{k}.weight", (width, width)) for k in range(layers))
    rows = rows_of(Model("", shapes), with_ds_config(Setup(max_round_mib=0), config))
    before = psutil.Process().memory_info().rss
    reset_peak()
    engine = engine_of(config, layers, width)
    taken = train(engine, steps, width)
    result = {
        "numel": layers * width**2,
        "planned_bytes": {f"{row.place}, {row.what}": row.zero8_bytes for row in rows},
        "peak_bytes": peak_bytes() - before,
        "losses": [loss for loss, _ in taken],
        "step_ms": [ms for _, ms in taken],
    }
    if folder is None:
        return result
    reset_peak()
    engine.save_checkpoint(folder)
    peaks = {"save": peak_bytes() - before}
    engine.destroy()
    universal = config | {"checkpoint": {"load_universal": True}}
    phases = {
        "load": (load, config, layers, width, folder),
        "convert": (convert, folder, folder / "universal", "zero"),
        "load at another number of ranks": (load, universal, layers, width, folder),
    }
    for name, (function, *arguments) in phases.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            peaks[name] = pool.submit(peak_of, function, *arguments).result()
    return result | {"peaks_bytes": peaks}


def peak_of(function: Callable, *arguments: Any) -> int:
    """Return by how many bytes memory was more than now, at most, in a call."""
    os.environ["MASTER_PORT"] = "0"  # not the parent's
    before = psutil.Process().memory_info().rss
    reset_peak()
    function(*arguments)
    return peak_bytes() - before


def reset_peak() -> None:
    """Begin to measure the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory that this process has had since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1])


def load(config: dict[str, Any], layers: int, width: int, folder: Path) -> None:
    """Load a checkpoint into a new engine."""
    engine_of(config, layers, width).load_checkpoint(folder)


def engine_of(config: dict[str, Any], layers: int, width: int) -> Any:
    """Return an engine over a new model."""
    import deepspeed

    os.environ.update({**ONE_RANK, "MASTER_PORT": "0"} | os.environ)
    is_stage3 = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=is_stage3):
        model = nn.Sequential(*(Layer(width, width, bias=False) for _ in range(layers)))
    return deepspeed.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int, width: int) -> list[tuple[float, float]]:
    """Return for each step its loss, and the time of `engine.step()` in ms."""
    x = torch.randn(width, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    taken = []
    for _ in range(steps):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        began = time.perf_counter()
        engine.step()
        taken.append((loss.item(), 1e3 * (time.perf_counter() - began)))
    return taken


def markdown(result: dict) -> list[str]:
    """Return the lines of the table of a result."""
    planned = {what: size for what, size in result["planned_bytes"].items() if size}
    sizes = planned | {
        "**planned**": sum(planned.values()),
        "**peak of the process, without what it held before**": result["peak_bytes"],
        **{f"peak, {phase}": size for phase, size in result.get("peaks_bytes", {}).items()},
    }
    rows = [{"what": what, "gib": size / GIB} for what, size in sizes.items()]
    losses = ", ".join(f"{loss:.4f}" for loss in result["losses"])
    times = ", ".join(f"{ms:,.0f}" for ms in result["step_ms"])
    return [
        f"{result['numel']:,} parameters.",
        "",
        *record.table_of(rows, {"": ("what", record.TEXT), "GiB": ("gib", "{:.2f}")}),
        "",
        f"Losses of the steps: {losses}; `engine.step()` took {times} ms.",
    ]


def main() -> None:
    """Measure and write both files."""
    parser = record.parser(MODULE, __doc__)
    parser.add_argument("--config", type=Path, required=True, help="of DeepSpeed")
    parser.add_argument("--numel", type=float, required=True, help="parameters")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model's square layers")
    parser.add_argument(
        "--checkpoint", type=Path, help="a new folder: measure save and resume, too"
    )
    arguments = parser.parse_args()
    result = record.environment(MODULE)
    config = json.loads(arguments.config.read_text())
    result |= measure(
        config, int(arguments.numel), arguments.steps, arguments.width, arguments.checkpoint
    )
    record.write(result, arguments.json, markdown, "Memory of one process")


if __name__ == "__main__":
    main()
