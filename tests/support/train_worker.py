# SPDX-License-Identifier: Apache-2.0
"""Short runs of the demonstration job, on ranks that may have run something else before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from places import ROOT
from ranks import error_of
from torch.distributed.tensor import DTensor

from examples.gpt import run
from examples.gpt.data import load_text, train_batch
from examples.gpt.engine import FLOAT32, FSDP2, defaults, engine_class
from examples.gpt.int8_weights import convert, separated
from examples.gpt.model import GPT, GPTConfig

# Of the learning rate's schedule, as in the job itself.
TOTAL_STEPS = 400
# A quarter of the job's.
SMALL = GPTConfig(context=32)


@contextmanager
def small_job() -> Iterator[None]:
    with patch.object(run, "VALIDATION_WINDOWS", 16), patch.dict(run.MODELS, demo=SMALL):
        yield


def corpus():
    return load_text(str(ROOT / "zero8"))


def row(
    engine: str,
    optimizer: str,
    steps: int,
    checkpoint: str,
    save_every: int | None = None,
    resume: bool = False,
    config: str | None = None,
    total_steps: int = TOTAL_STEPS,
    weights: str = FLOAT32,
    codec: str | None = None,
) -> dict | None:
    """Return the measurements of the first steps of a run, which is saved to a folder."""
    kind = engine_class(engine)
    path = Path(config or ROOT / defaults(engine, optimizer)[0])
    settings = kind.load_config(path, optimizer, total_steps, codec)
    with small_job():
        return run.measured(
            kind,
            settings,
            corpus(),
            model="demo",
            weights=weights,
            seed=0,
            steps=steps,
            name=optimizer,
            checkpoint=Path(checkpoint),
            save_every=save_every or steps,
            resume=resume,
        )


def error_of_row(**arguments) -> tuple[str, str] | None:
    """Return the type and text of what `row` raises on this rank."""
    return error_of(row, **arguments)


def loaded_int8_weights(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the whole weights that a run goes on with, INT8 ones as their codes and scales."""
    kind, optimizer = engine_class(FSDP2), "Adam8bitBlockwise"
    settings = kind.load_config(ROOT / defaults(FSDP2, optimizer)[0], optimizer, TOTAL_STEPS)
    model = GPT(SMALL)
    convert(model)
    parts = separated(kind(model, settings, Path(checkpoint)).model.state_dict())
    return {
        name: part.full_tensor() if isinstance(part, DTensor) else part
        for name, part in parts.items()
    }


def losses_under_fsdp2(
    optimizer: str,
    steps: int,
    micro_batches: int = 1,
    offload: bool = True,
    mixed_precision: str = "none",
) -> list[float]:
    """Return this rank's losses at the steps of `row`, on the same windows."""
    kind = engine_class(FSDP2)
    settings = kind.load_config(ROOT / defaults(FSDP2, optimizer)[0], optimizer, TOTAL_STEPS)
    settings["fsdp2"] = {"offload": offload, "mixed_precision": mixed_precision}
    torch.manual_seed(0)
    engine = kind(GPT(SMALL), settings)
    text, rank, losses = corpus().train, torch.distributed.get_rank(), []
    for step in range(steps):
        windows = train_batch(text, 8, SMALL.context, seed=0, step=step, rank=rank)
        of_parts = engine.step(list(windows.chunk(micro_batches)))
        losses.append(sum(of_parts) / len(of_parts))
    return losses
