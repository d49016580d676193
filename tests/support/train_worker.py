# SPDX-License-Identifier: Apache-2.0
"""Short runs of the demonstration job, on ranks that may have run something else before."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from places import ROOT

from examples.gpt import __main__ as command
from examples.gpt.__main__ import FLOAT32
from examples.gpt.engines import load_config
from examples.gpt.model import GPTConfig

# The job's configs, by engine and optimizer.
DEEPSPEED, FSDP2 = "deepspeed", "fsdp2"
CONFIGS = {DEEPSPEED: "zero2_offload{}.json", FSDP2: "fsdp2_offload{}.toml"}
# A quarter of the job's.
SMALL = GPTConfig(context=32)
DATA = str(ROOT / "zero8")


@contextmanager
def small_job(model: GPTConfig) -> Iterator[None]:
    with patch.object(command, "VALIDATION_WINDOWS", 16), patch.dict(command.MODELS, demo=model):
        yield


def config_of(engine: str, optimizer: str) -> Path:
    """Return the config that launch/local.sh takes for an optimizer of a pair."""
    name = optimizer.removesuffix("8bitBlockwise").lower()
    return ROOT / "configs" / CONFIGS[engine].format("" if name.startswith("adam") else f"_{name}")


def row(
    engine: str,
    optimizer: str,
    steps: int,
    out: str,
    save_every: int | None = None,
    resume: bool = False,
    config: str | None = None,
    weights: str = FLOAT32,
    codec: str | None = None,
    model: GPTConfig = SMALL,
) -> dict | None:
    """Return the measurements of a run, which is saved to a folder."""
    path = Path(config or config_of(engine, optimizer))
    arguments = dict(model="demo", weights=weights, seed=0, steps=steps, optimizer=optimizer)
    arguments |= dict(config=path, data=DATA, out=Path(out), save_every=save_every, resume=resume)
    Path(out).mkdir(parents=True, exist_ok=True)
    with small_job(model):
        return command.train(Namespace(**arguments), load_config(path, optimizer, codec))
