# SPDX-License-Identifier: Apache-2.0
"""What a rank runs of test_monitor.py: engines whose DeepSpeed config turns its CSV monitor on."""

import csv
from pathlib import Path

import deepspeed
import torch

from zero8.integrations.deepspeed import monitor

STEPS, ACCUMULATED, ROWS = 4, 2, 2


def engine(stage: int, csv_monitor: dict):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATED,
        "optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "csv_monitor": csv_monitor,
    }
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    made, *_ = deepspeed.initialize(model=model, config=config)
    return made


def train(made) -> None:
    for _ in range(STEPS * ACCUMULATED):
        made.backward(made(torch.ones(ROWS, 64)).square().mean())
        made.step()


def written(folder: Path) -> dict[str, list[list[str]]]:
    """Return the rows of each file of a CSV monitor."""
    return {path.stem: list(csv.reader(path.open())) for path in folder.rglob("*.csv")}


def monitored(folder: str, stages) -> dict:
    """Train for STEPS steps as DeepSpeed does, and for as many with the optimizer's health."""
    result = {}
    for stage in stages:
        job = f"stage{stage}"
        made = engine(stage, {"enabled": True, "output_path": folder, "job_name": job})
        train(made)
        before = written(Path(folder, job))
        monitor(made, every=2)
        train(made)
        rows = made.optimizer.optimizer.memory_report().rows
        num_bytes = sum(row.state_bytes for row in rows)
        result[stage] = {"before": before, "after": written(Path(folder, job)), "bytes": num_bytes}
    return result
