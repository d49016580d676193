# SPDX-License-Identifier: Apache-2.0
"""One training run under DeepSpeed with the optimizer that the config names."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch
from tqdm import trange

import zero8  # noqa: F401 - registers the optimizer type "Adam8bitBlockwise"
from zero8.train.build import leave_out_shared_memory
from zero8.train.config import load_config
from zero8.train.data import Text, load_text, train_batch, unigram_entropy, validation_windows
from zero8.train.log import log_warnings
from zero8.train.measure import (
    StepTimer,
    host_peak_gib,
    state_report,
    steady_median,
    sum_over_ranks,
)
from zero8.train.model import GPT, GPTConfig

VALIDATION_EVERY = 50
VALIDATION_WINDOWS = 256
# The reported train loss is the mean of this many last steps: one batch's loss is noisy.
TRAIN_LOSS_STEPS = 20


@dataclass
class Curves:
    """What is recorded while training; losses in nats per byte, averaged over ranks."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    iteration_ms: list[float] = field(default_factory=list)


def mean_over_ranks(total: float, count: int) -> float:
    """Return the mean of values of which each rank holds a sum and a count."""
    total, count = sum_over_ranks([total, count])
    return total / count


def train_step(engine, text: torch.Tensor, *, seed: int, step: int) -> float:
    """Run one optimizer step and return its loss (nats per byte) averaged over ranks."""
    micro_batches = engine.gradient_accumulation_steps()
    losses = []
    for micro_batch in range(micro_batches):
        batch = train_batch(
            text,
            engine.train_micro_batch_size_per_gpu(),
            engine.module.config.context,
            seed=seed,
            step=step * micro_batches + micro_batch,
            rank=dist.get_rank(),
        )
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return mean_over_ranks(sum(losses), len(losses))


@torch.no_grad()
def validate(engine, windows: torch.Tensor) -> float:
    """Return the mean loss over all windows, nats per byte; each rank takes its share of them."""
    engine.eval()
    mine = windows[dist.get_rank() :: dist.get_world_size()].to(engine.device)
    total = 0.0
    for batch in mine.split(engine.train_micro_batch_size_per_gpu()):
        total += engine(batch).item() * len(batch)
    engine.train()
    return mean_over_ranks(total, len(mine))


def fit(engine, text: Text, windows: torch.Tensor, *, seed: int, steps: int, name: str) -> Curves:
    """Train for `steps` optimizer steps, with validation on the way and at the end."""
    timer = StepTimer(engine.basic_optimizer)
    curves = Curves()
    tokens = engine.train_batch_size() * engine.module.config.context
    progress = trange(steps, desc=name, unit="step", mininterval=1, disable=dist.get_rank() != 0)
    for step in progress:
        started = time.perf_counter()
        curves.train.append(train_step(engine, text.train, seed=seed, step=step))
        curves.iteration_ms.append(1e3 * (time.perf_counter() - started))
        curves.step_ms.append(timer.take_ms())
        progress.set_postfix_str(
            f"loss {curves.train[-1]:.3f} nats/byte, "
            f"{1e3 * tokens / curves.iteration_ms[-1]:.0f} tokens/s, "
            f"optimizer step {curves.step_ms[-1]:.1f} ms",
            refresh=False,
        )
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == steps:
            curves.validation.append((step + 1, validate(engine, windows)))
    return curves


def describe(text: Text) -> str:
    """Return one line on the corpus and its split, for people."""
    d = text.describe()
    return (
        f"data: {d['path']}, {d['files']} files, {d['bytes']:,} bytes, split {d['split']}: "
        f"train {d['train_files']} files, {d['train_bytes']:,} bytes; validation "
        f"{d['validation_files']} files, {d['validation_bytes']:,} bytes, unigram entropy "
        f"{unigram_entropy(text.validation):.4f} nats/byte"
    )


def result(engine, text: Text, curves: Curves) -> dict:
    """Return the measured part of a run's result; every rank must call it."""
    last = curves.train[-TRAIN_LOSS_STEPS:]
    return {
        "val_loss": curves.validation[-1][1],
        "train_loss": sum(last) / len(last),
        **state_report(engine.basic_optimizer),
        "host_peak_gib": host_peak_gib(),
        # Rank 0's; the ranks hold equal shares and wait for one another.
        "step_ms": steady_median(curves.step_ms),
        "iteration_ms": steady_median(curves.iteration_ms),
        "tokens_per_step": engine.train_batch_size() * engine.module.config.context,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "device": engine.device.type,
        "ranks": dist.get_world_size(),
        "unigram_entropy": unigram_entropy(text.validation),
        "data": text.describe(),
        "train_curve": curves.train,
        "val_curve": curves.validation,
    }


def train(*, optimizer: str, config: Path, data: str | None, seed: int, steps: int, out: Path):
    """Train once from `seed` and write OUT/<optimizer>.json from rank 0."""
    text = load_text(data)
    settings = load_config(config, optimizer, steps)
    log_warnings(out / f"{optimizer}.rank{os.environ['RANK']}.log")
    leave_out_shared_memory()
    torch.manual_seed(seed)
    model = GPT(GPTConfig())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    if dist.get_rank() == 0:
        print(describe(text))
        print(f"warnings of DeepSpeed and PyTorch: {out / optimizer}.rank*.log", flush=True)
    windows = validation_windows(text.validation, VALIDATION_WINDOWS, model.config.context)
    curves = fit(engine, text, windows, seed=seed, steps=steps, name=optimizer)
    arguments = {"optimizer": optimizer, "steps": steps, "seed": seed, "config": str(config)}
    row = {**arguments, **result(engine, text, curves)}
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{optimizer}.json").write_text(json.dumps(row, indent=1) + "\n")
    dist.destroy_process_group()
