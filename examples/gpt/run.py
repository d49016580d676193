# SPDX-License-Identifier: Apache-2.0
"""One training run: what does not depend on the engine."""

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import trange

from examples.gpt import int8_weights
from examples.gpt.data import Text, load_text, train_batch, unigram_entropy, validation_windows
from examples.gpt.engine import INT8, Engine
from examples.gpt.engines import engine_class
from examples.gpt.log import log_warnings
from examples.gpt.measure import (
    StepTimer,
    gpu_peak_gib,
    host_peak_gib,
    state_report,
    steady_median,
    sum_over_ranks,
    weight_bytes_per_param,
)
from examples.gpt.model import GPT, MODELS, GPTConfig
from zero8 import extras

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


def mean_over_ranks(total: float, count: int, device: torch.device) -> float:
    """Return the mean of values of which each rank holds a sum and a count."""
    total, count = sum_over_ranks([total, count], device)
    return total / count


def tokens_per_step(engine: Engine) -> int:
    """Return the bytes that all ranks together train on in one optimizer step."""
    windows = engine.micro_batch_size * engine.accumulation_steps * dist.get_world_size()
    return windows * engine.model.config.context


def train_step(engine: Engine, text: torch.Tensor, *, seed: int, step: int) -> float:
    """Run one optimizer step and return its loss (nats per byte) averaged over ranks."""
    batches = [
        train_batch(
            text,
            engine.micro_batch_size,
            engine.model.config.context,
            seed=seed,
            step=step * engine.accumulation_steps + micro_batch,
            rank=dist.get_rank(),
        ).to(engine.device)
        for micro_batch in range(engine.accumulation_steps)
    ]
    losses = engine.step(batches)
    return mean_over_ranks(sum(losses), len(losses), engine.device)


@torch.no_grad()
def validate(engine: Engine, windows: torch.Tensor) -> float:
    """Return the mean loss over all windows, nats per byte; each rank takes its share of them.

    All ranks call the module equally often, as each call may gather parameters.
    """
    engine.module.eval()
    mine = windows[dist.get_rank() :: dist.get_world_size()]
    largest_share = -(-len(windows) // dist.get_world_size())
    total = 0.0
    for begin in range(0, largest_share, engine.micro_batch_size):
        batch = mine[begin : begin + engine.micro_batch_size]
        shown = batch if len(batch) else windows[:1]
        total += engine.module(shown.to(engine.device)).item() * len(batch)
    engine.module.train()
    return mean_over_ranks(total, len(mine), engine.device)


def fit(
    engine: Engine,
    text: Text,
    windows: torch.Tensor,
    *,
    seed: int,
    steps: int,
    name: str,
    checkpoint: Path,
    save_every: int,
) -> Curves:
    """Train up to step `steps`, with validation and checkpoints on the way and at the end."""
    timer = StepTimer(engine.optimizer, engine.synchronize)
    curves = Curves()
    tokens = tokens_per_step(engine)
    progress = trange(
        engine.steps_done,
        steps,
        initial=engine.steps_done,
        total=steps,
        desc=name,
        unit="step",
        mininterval=1,
        disable=dist.get_rank() != 0,
    )
    for step in progress:
        started = time.perf_counter()
        curves.train.append(train_step(engine, text.train, seed=seed, step=step))
        curves.iteration_ms.append(1e3 * (time.perf_counter() - started))
        curves.step_ms.append(timer.take_ms())
        speed = f"{1e3 * tokens / curves.iteration_ms[-1]:.0f} tokens/s"
        if engine.has_whole_step:
            speed += f", optimizer step {curves.step_ms[-1]:.1f} ms"
        progress.set_postfix_str(f"loss {curves.train[-1]:.3f} nats/byte, {speed}", refresh=False)
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == steps:
            curves.validation.append((step + 1, validate(engine, windows)))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            engine.save(checkpoint, step + 1)
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


def codec_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the codec of zero8's states, None of an fp32 optimizer."""
    codec = getattr(optimizer, "codec", None)
    return None if codec is None else codec.name


def result(engine: Engine, text: Text, curves: Curves) -> dict:
    """Return the measured part of a run's result; every rank must call it."""
    last = curves.train[-TRAIN_LOSS_STEPS:]
    return {
        "codec": codec_of(engine.optimizer),
        "val_loss": curves.validation[-1][1],
        "train_loss": sum(last) / len(last),
        "weight_bytes_per_param": weight_bytes_per_param(engine.optimizer, engine.device),
        **state_report(engine.optimizer, engine.device),
        "host_peak_gib": host_peak_gib(engine.device),
        "gpu_peak_gib": gpu_peak_gib(engine.device),
        # Rank 0's; the ranks hold equal shares and wait for one another.
        "step_ms": steady_median(curves.step_ms) if engine.has_whole_step else None,
        "iteration_ms": steady_median(curves.iteration_ms),
        "tokens_per_step": tokens_per_step(engine),
        "device": engine.device.type,
        "ranks": dist.get_world_size(),
        "unigram_entropy": unigram_entropy(text.validation),
        "data": text.describe(),
        "train_curve": curves.train,
        "val_curve": curves.validation,
    }


def measured(
    kind: type[Engine],
    settings: object,
    text: Text,
    *,
    config: GPTConfig,
    weights: str,
    seed: int,
    steps: int,
    name: str,
    checkpoint: Path,
    save_every: int,
    resume: bool,
) -> dict | None:
    """Train a new model from `seed`, save it; return `result`.  Every rank must call it.

    Args:
        kind: of engine.
        settings: what its `load_config` returned.
        text: to train on and to validate with.
        config: sizes of the model.
        weights: format of the weights of its linear layers.
        seed: of initialization and batches.
        steps: optimizer steps.
        name: what to call the run on the screen.
        checkpoint: folder to save to, when training is over and on the way.
        save_every: steps from one checkpoint to the next.
        resume: go on from the newest complete checkpoint there, if there is one.

    Returns:
        None if the checkpoint is of the last step already.
    """
    torch.manual_seed(seed)
    model = GPT(config)
    parameters = sum(p.numel() for p in model.parameters())  # before ZeRO-3 takes them away
    if weights == INT8:
        int8_weights.convert(model)
    engine = kind(model, settings, checkpoint if resume else None)
    if dist.get_rank() == 0 and resume:
        where = f"step {engine.steps_done} of {steps}" if engine.steps_done else "the start"
        print(f"{name}: {dist.get_world_size()} rank(s) go on from {where}", flush=True)
    if engine.steps_done >= steps:
        return None
    windows = validation_windows(text.validation, VALIDATION_WINDOWS, engine.model.config.context)
    curves = fit(
        engine,
        text,
        windows,
        seed=seed,
        steps=steps,
        name=name,
        checkpoint=checkpoint,
        save_every=save_every,
    )
    counts = {"first_step": engine.steps_done, "parameters": parameters}
    return {**counts, **result(engine, text, curves)}


def train(
    *,
    engine: str,
    optimizer: str,
    codec: str | None,
    weights: str,
    config: Path,
    model: str,
    data: str | None,
    seed: int,
    steps: int,
    out: Path,
    save_every: int,
    resume: bool,
) -> None:
    """Train once from `seed`; write OUT/<optimizer>.checkpoint and, from rank 0, the .json."""
    kind, rank = engine_class(engine), int(os.environ["RANK"])
    text = load_text(data)
    settings = kind.load_config(config, optimizer, steps, codec)
    log_warnings(out / f"{optimizer}.rank{rank}.log")
    if weights == INT8:
        extras.need("torchao")
    checkpoint = out / f"{optimizer}.checkpoint"
    if rank == 0:
        print(describe(text))
        print(f"warnings of each rank: {out / optimizer}.rank*.log", flush=True)
        if not resume:
            shutil.rmtree(checkpoint, ignore_errors=True)
    arguments = {"engine": engine, "optimizer": optimizer, "weights": weights}
    arguments |= {"steps": steps, "seed": seed}
    measurements = measured(
        kind,
        settings,
        text,
        config=MODELS[model],
        weights=weights,
        seed=seed,
        steps=steps,
        name=optimizer,
        checkpoint=checkpoint,
        save_every=save_every,
        resume=resume,
    )
    if rank == 0 and measurements is not None:
        row = {**arguments, "config": str(config), **measurements}
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{optimizer}.json").write_text(json.dumps(row, indent=1) + "\n")
    dist.destroy_process_group()
