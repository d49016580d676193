# SPDX-License-Identifier: Apache-2.0
"""One training run: what does not depend on the engine."""

import json
import logging
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import trange

from examples.gpt import int8_weights
from examples.gpt.data import Text, load_text, train_batch, validation_windows
from examples.gpt.engine import FLOAT32, INT8, engine_class
from examples.gpt.measure import memory, sum_over_ranks
from examples.gpt.model import GPT, MODELS
from zero8 import extras

VALIDATION_EVERY = 50
VALIDATION_WINDOWS = 256
# The reported train loss is the mean of this many last steps: one batch's loss is noisy.
TRAIN_LOSS_STEPS = 20
# The first steps allocate the states and fill caches.
WARM_UP_STEPS = 5


def log_warnings(path: Path) -> None:
    """Send warnings of this process to a new file; errors still show on the screen, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, screen = logging.FileHandler(path, mode="w"), logging.StreamHandler()
    screen.setLevel(logging.ERROR)
    for name in ("py.warnings", "DeepSpeed", "torchao"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [file, screen]
        logger.propagate = False
    logging.captureWarnings(True)


def mean_over_ranks(total: float, count: int, device: torch.device) -> float:
    """Return the mean of values of which each rank holds a sum and a count."""
    total, count = sum_over_ranks([total, count], device)
    return total / count


def train_step(engine, text: torch.Tensor, *, seed: int, step: int) -> float:
    """Run one optimizer step and return its loss (nats per byte) averaged over ranks."""
    size, context, parts = engine.micro_batch_size, engine.model.config.context, []
    for part in range(engine.accumulation_steps):
        place = {"step": step * engine.accumulation_steps + part, "rank": dist.get_rank()}
        parts.append(train_batch(text, size, context, seed=seed, **place).to(engine.device))
    losses = engine.step(parts)
    return mean_over_ranks(sum(losses), len(losses), engine.device)


@torch.no_grad()
def validate(engine, windows: torch.Tensor) -> float:
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


def fit(engine, text: Text, *, seed: int, steps: int, name: str, checkpoint: Path, save_every: int):
    """Train up to step `steps`, with validation and checkpoints on the way and at the end.

    Returns:
        The losses by step, and at the steps with a validation, in nats per byte, averaged over
        ranks; and the ms of each iteration.
    """
    windows = validation_windows(text.validation, VALIDATION_WINDOWS, engine.model.config.context)
    train, validation, iteration_ms = [], [], []
    settings = {"desc": name, "initial": engine.steps_done, "total": steps, "unit": "step"}
    progress = trange(engine.steps_done, steps, **settings, disable=dist.get_rank() != 0)
    for step in progress:
        started = time.perf_counter()
        train.append(train_step(engine, text.train, seed=seed, step=step))
        iteration_ms.append(1e3 * (time.perf_counter() - started))
        progress.set_postfix_str(f"loss {train[-1]:.3f} nats/byte", refresh=False)
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == steps:
            validation.append((step + 1, validate(engine, windows)))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            engine.save(checkpoint, step + 1)
    return train, validation, iteration_ms


def result(engine, text: Text, curves: tuple[list, list, list]) -> dict:
    """Return what was measured in a run; every rank must call it."""
    train, validation, iteration_ms = curves
    codec = getattr(engine.optimizer, "codec", None)
    return {
        "first_step": engine.steps_done,
        "codec": codec and codec.name,
        "val_loss": validation[-1][1],
        "train_loss": statistics.mean(train[-TRAIN_LOSS_STEPS:]),
        **memory(engine.optimizer, engine.device),
        # Rank 0's; the ranks wait for one another.
        "iteration_ms": statistics.median(iteration_ms[WARM_UP_STEPS:] or iteration_ms),
        "device": engine.device.type,
        "ranks": dist.get_world_size(),
        "data": text.describe(),
        "train_curve": train,
        "val_curve": validation,
    }


def measured(
    kind: type,
    config: object,
    text: Text,
    *,
    model: str,
    seed: int,
    steps: int,
    name: str,
    checkpoint: Path,
    save_every: int,
    resume: bool = False,
    weights: str = FLOAT32,
) -> dict | None:
    """Train a model from `seed`, save it; return `result`.  Every rank must call it.

    Args:
        kind: of engine.
        config: what its `load_config` returned.
        text: to train on and to validate with.
        model: a key of `MODELS`.
        seed: of initialization and batches.
        steps: optimizer steps.
        name: of the run on the screen.
        checkpoint: folder to save to.
        save_every: steps from one checkpoint to the next; the end has one, too.
        resume: go on from the newest complete checkpoint there, if there is one.
        weights: format of the weights of the linear layers.

    Returns:
        None if the checkpoint is of the last step already.
    """
    torch.manual_seed(seed)
    gpt = GPT(MODELS[model])
    parameters = sum(p.numel() for p in gpt.parameters())  # before ZeRO-3 takes them away
    if weights == INT8:
        int8_weights.convert(gpt)
    engine = kind(gpt, config, checkpoint if resume else None)
    if dist.get_rank() == 0 and not resume:  # not before there is an engine to make another
        shutil.rmtree(checkpoint, ignore_errors=True)
    if dist.get_rank() == 0 and resume:
        where = f"step {engine.steps_done} of {steps}" if engine.steps_done else "the start"
        print(f"{name}: {dist.get_world_size()} rank(s) go on from {where}", flush=True)
    if engine.steps_done >= steps:
        return None
    run = {"seed": seed, "steps": steps, "name": name}
    curves = fit(engine, text, **run, checkpoint=checkpoint, save_every=save_every)
    return {"parameters": parameters, **result(engine, text, curves)}


def train(
    *,
    engine: str,
    optimizer: str,
    codec: str | None,
    config: Path,
    data: str | None,
    out: Path,
    **run,
) -> None:
    """Train once; write OUT/<optimizer>.checkpoint and, from rank 0, the .json.

    `run` has the other arguments of `measured`.
    """
    kind, rank = engine_class(engine), int(os.environ["RANK"])
    text = load_text(data)
    settings = kind.load_config(config, optimizer, run["steps"], codec)
    log_warnings(out / f"{optimizer}.rank{rank}.log")
    if run["weights"] == INT8:
        extras.need("torchao")
    if rank == 0:
        print("data:", ", ".join(f"{key} {value}" for key, value in text.describe().items()))
        print(f"warnings of each rank: {out / optimizer}.rank*.log", flush=True)
    files = {"name": optimizer, "checkpoint": out / f"{optimizer}.checkpoint"}
    found = measured(kind, settings, text, **files, **run)
    if rank == 0 and found is not None:
        asked = {key: run[key] for key in ("weights", "steps", "seed")}
        row = {"engine": engine, "optimizer": optimizer, **asked, "config": str(config), **found}
        (out / f"{optimizer}.json").write_text(json.dumps(row, indent=1) + "\n")
    dist.destroy_process_group()
