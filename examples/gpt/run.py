# SPDX-License-Identifier: Apache-2.0
"""One training run: what does not depend on the engine."""

import argparse
import json
import resource
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import trange

from benchmarks.states import plain_tensors, state_bytes
from examples.gpt.config import INT8, is_of_fsdp2
from examples.gpt.data import load_text, train_batch, validation_windows
from examples.gpt.model import GPT, MODELS
from zero8.state.extent import local

VALIDATION_EVERY = 50
VALIDATION_WINDOWS = 256
# The reported train loss is the mean of this many last steps: one batch's loss is noisy.
TRAIN_LOSS_STEPS = 20
# The first steps allocate the states and fill caches.
WARM_UP_STEPS = 5


def engine_class(config: Path) -> type:
    """Return the class of the engine of a config; here alone is its framework imported."""
    if is_of_fsdp2(config):
        from examples.gpt.engine_fsdp2 import FSDP2Engine

        return FSDP2Engine
    from examples.gpt.engine_deepspeed import DeepSpeedEngine

    return DeepSpeedEngine


def train(arguments: argparse.Namespace, config: dict) -> dict | None:
    """Train on every rank, unless that was done, and write what was measured."""
    name, steps = arguments.optimizer, arguments.steps
    text = load_text(arguments.data)
    torch.manual_seed(arguments.seed)
    gpt = GPT(MODELS[arguments.model])
    parameters = sum(p.numel() for p in gpt.parameters())  # before ZeRO-3 takes them away
    if arguments.weights == INT8:
        from examples.gpt.engine_fsdp2 import make_int8

        make_int8(gpt)
    checkpoint = arguments.out / f"{name}.checkpoint"
    kind = engine_class(arguments.config)
    engine = kind(gpt, config, steps, checkpoint if arguments.resume else None)
    is_first = dist.get_rank() == 0
    if is_first and not arguments.resume:  # not before there is an engine to make another
        shutil.rmtree(checkpoint, ignore_errors=True)
    if is_first:
        print("data:", ", ".join(f"{key} {value}" for key, value in text.about.items()))
        print(f"warnings of each rank: {arguments.out / name}.rank*.log")
        where = f"step {engine.steps_done} of {steps}" if engine.steps_done else "the start"
        print(f"{name}: {dist.get_world_size()} rank(s) go on from {where}", flush=True)
    if engine.steps_done >= steps:
        return None
    asked = {key: getattr(arguments, key) for key in ("optimizer", "weights", "steps", "seed")}
    row = {**asked, "config": str(arguments.config), "parameters": parameters}
    row |= {"data": text.about, **fit(engine, text, arguments, checkpoint)}
    if is_first:
        (arguments.out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    return row


def fit(engine, text, arguments: argparse.Namespace, checkpoint: Path) -> dict:
    """Train, with validation and checkpoints on the way and at the end; return measurements."""
    context = engine.model.config.context
    windows = validation_windows(text.validation, VALIDATION_WINDOWS, context)
    steps, save_every = arguments.steps, arguments.save_every or arguments.steps
    train, validation, iteration_ms = [], [], []
    settings = {"desc": arguments.optimizer, "initial": engine.steps_done, "total": steps}
    settings |= {"unit": "step", "disable": dist.get_rank() != 0}
    progress = trange(engine.steps_done, steps, **settings)
    for step in progress:
        started = time.perf_counter()
        place = {"seed": arguments.seed, "step": step, "rank": dist.get_rank()}
        batch = train_batch(text.train, engine.batch_size, context, **place)
        losses = engine.step(batch.to(engine.device))
        train.append(mean_over_ranks(sum(losses), len(losses), engine.device))
        iteration_ms.append(1e3 * (time.perf_counter() - started))
        progress.set_postfix_str(f"loss {train[-1]:.3f} nats/byte", refresh=False)
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == steps:
            validation.append((step + 1, validate(engine, windows)))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            engine.save(checkpoint, step + 1)
    settings = getattr(engine.optimizer, "settings", None)
    return {
        "first_step": engine.steps_done,
        "codec": settings and settings.codec.name,
        "val_loss": validation[-1][1],
        "train_loss": statistics.mean(train[-TRAIN_LOSS_STEPS:]),
        **memory(engine.optimizer, engine.device),
        # Rank 0's; the ranks wait for one another.
        "iteration_ms": statistics.median(iteration_ms[WARM_UP_STEPS:] or iteration_ms),
        "device": engine.device.type,
        "ranks": dist.get_world_size(),
        "train_curve": train,
        "val_curve": validation,
    }


@torch.no_grad()
def validate(engine, windows: torch.Tensor) -> float:
    """Return the mean loss over the windows, nats per byte; each rank takes an equal share."""
    share = max(1, len(windows) // dist.get_world_size())
    mine = windows.roll(-share * dist.get_rank(), 0)[:share]
    engine.module.eval()
    batches = mine.split(engine.micro_batch_size)
    total = sum(engine.module(one.to(engine.device)).item() * len(one) for one in batches)
    engine.module.train()
    return mean_over_ranks(total, share, engine.device)


def memory(optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """Return the bytes of states and of stepped weights over all ranks, and the peaks of memory."""
    stepped = [p for p, state in optimizer.state.items() if state]
    stepped_numel = sum(local(p).numel() for p in stepped)
    if hasattr(optimizer, "memory_report"):
        rows = [(r.state_bytes, r.numel, r.bits < 32) for r in optimizer.memory_report().rows]
    else:
        rows = [(state_bytes(optimizer), stepped_numel, True)]
    in_few_bits = [row for row in rows if row[2]]
    sums = [sum(row[column] for row in some) for some in (in_few_bits, rows) for column in (0, 1)]
    sums += [sum(t.nbytes for t in plain_tensors(stepped)), stepped_numel]
    sums += [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    own, own_numel, size, numel, weight, weight_numel, peak = sum_over_ranks(sums, device)
    on_gpu = device.type == "cuda"
    return {
        "weight_bytes_per_param": weight / weight_numel if weight_numel else None,
        "state_bytes_per_param": own / own_numel if own_numel else None,
        "state_bytes": int(size),
        "state_numel": int(numel),
        "host_peak_gib": peak / 2**30,
        "gpu_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
    }


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the element-wise sum over all ranks, by way of tensors on `device`."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def mean_over_ranks(total: float, count: int, device: torch.device) -> float:
    """Return the mean of values of which each rank holds a sum and a count."""
    total, count = sum_over_ranks([total, count], device)
    return total / count
