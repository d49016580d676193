# SPDX-License-Identifier: Apache-2.0
"""Short runs of the demonstration job, on ranks that may have run something else before."""

from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

from places import ROOT

from examples.gpt import __main__ as command
from examples.gpt.__main__ import FLOAT32
from examples.gpt.engines import load_config
from examples.gpt.model import GPTConfig
from zero8.files import tags
from zero8.files.manifest import MANIFEST

# The job's configs, by engine and optimizer.
DEEPSPEED, FSDP2 = "deepspeed", "fsdp2"
CONFIGS = {DEEPSPEED: "zero2_offload{}.json", FSDP2: "fsdp2_offload{}.toml"}
# A quarter of the job's.
SMALL = GPTConfig(context=32)
DATA = str(ROOT / "zero8")


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
    weights: str = FLOAT32,
    codec: str | None = None,
) -> dict | None:
    """Return the measurements of a run, which is saved to a folder."""
    path = config_of(engine, optimizer)
    arguments = dict(model="demo", weights=weights, seed=0, steps=steps, optimizer=optimizer)
    arguments |= dict(config=path, data=DATA, out=Path(out), save_every=save_every, resume=resume)
    Path(out).mkdir(parents=True, exist_ok=True)
    with patch.object(command, "VALIDATION_WINDOWS", 16), patch.dict(command.MODELS, demo=SMALL):
        return command.train(Namespace(**arguments), load_config(path, optimizer, codec))


# The first two steps have learning rate 0, so three change the weights.
RANKS, STEPS = 2, 5


def check_resumed(standing_ranks, folder: Path, **job) -> None:
    """Check that a run whose newest checkpoint was cut short goes on with the same bits."""
    job = {"optimizer": "Adam8bitBlockwise", "steps": STEPS, "out": str(folder), **job}
    whole, _ = standing_ranks(RANKS).run(row, **job, save_every=STEPS - 1)
    (newest,) = folder.glob(f"{job['optimizer']}.checkpoint/*step{STEPS}")
    (newest / MANIFEST).unlink()
    tags.begin(newest, tags.next_sequence(newest.parent))
    resumed, _ = standing_ranks(RANKS).run(row, **job, resume=True)
    assert (resumed["first_step"], resumed["codec"]) == (STEPS - 1, "log")
    assert resumed["train_curve"] == whole["train_curve"][STEPS - 1 :]
    assert resumed["val_loss"] == whole["val_loss"]
    # What is done already is not done again.
    assert standing_ranks(RANKS).run(row, **job, resume=True) == [None, None]
