# SPDX-License-Identifier: Apache-2.0
"""Lightning: `configure_optimizers`, its checkpoints, and its strategies for sharded models."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import lightning
import pytest
import torch
from fsdp_worker import results, whole
from lightning.pytorch import strategies
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from nests import assert_same
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from zero_worker import held

from zero8 import Adam8bitBlockwise
from zero8.environment.ranks import gathered
from zero8.files import tags

pytestmark = pytest.mark.integrations

EPOCHS, BATCHES, SAVED = 4, 3, 2
"""Epochs of a run, steps of an epoch, and the epoch after which a run is cut off."""
CLIP = 0.05
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}
ELSEWHERE = 1000
"""The seed of a model whose weights a checkpoint has to replace."""

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Model(lightning.LightningModule):
    """Matrices of which one has narrow rows and one is too small for 8 bits, and their biases.

    It records `bits` after each epoch and when training began, and of each step the learning rate,
    the first beta and, but under ZeRO, the norm of all gradients after clipping.
    """

    def __init__(self, seed: int = 0, **keywords):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 16), nn.Linear(16, 1024)]
        self.net = nn.Sequential(*layers)
        self.keywords = keywords
        self.epochs, self.at_start = [], None
        self.lrs, self.betas, self.norms = [], [], []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs).float(), targets.float())

    def configure_optimizers(self) -> dict:
        optimizer = Adam8bitBlockwise(self.named_parameters(), **OPTIONS, **self.keywords)
        # It changes lr and, as momentum, beta1.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, EPOCHS * BATCHES)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_start(self) -> None:
        self.at_start = bits(self)

    def on_before_optimizer_step(self, optimizer) -> None:
        (group,) = optimizer.param_groups
        self.lrs.append(group["lr"])
        self.betas.append(group["betas"][0])

    def on_train_batch_end(self, *_) -> None:
        grads = [whole(p.grad).float().norm() for p in self.parameters() if p.grad is not None]
        if grads:
            self.norms.append(float(torch.stack(grads).norm()))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(bits(self))


class Sharded(Model):
    """The same under FSDP2; ModelParallelStrategy demands that `configure_model` shards."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class CPUInTheNameOfCUDA(CUDAAccelerator):
    """What DeepSpeedStrategy, which insists on CUDA, takes; devices are the CPU's."""

    def setup_device(self, device) -> None: ...

    def setup(self, trainer) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True


def bits(model: lightning.LightningModule) -> dict:
    """Return copies of all values and of all entries of saved states.

    By parameter, whole, on every rank; under ZeRO those of this rank.
    """
    strategy = model.trainer.strategy
    if isinstance(strategy, strategies.DeepSpeedStrategy):
        return held(strategy.deepspeed_engine)
    return results(model, model.optimizers(use_pl_optimizer=False))


def batches() -> DataLoader:
    """Return a data set that is read in order; each rank reads its part."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(24, 256, generator=generator)
    targets = torch.randn(24, 1024, generator=generator)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return DataLoader(TensorDataset(inputs, targets), batch_size=24 // BATCHES // num_ranks)


def checkpoint(folder: Path) -> Path:
    """Return where `fit` writes the checkpoint of epoch `SAVED`."""
    return folder / f"epoch={SAVED - 1}.ckpt"


def fit(model: Model, folder: Path, resume: Path | None = None, **keywords) -> Model:
    """Train a model to the end, with a checkpoint after each epoch, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers, logging and srun
        trainer = lightning.Trainer(
            **{"accelerator": "cpu", "devices": 1, **keywords},
            max_epochs=EPOCHS,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=CLIP,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        )
        trainer.fit(model, batches(), ckpt_path=resume, weights_only=True)
    return model


def check_cut_off(make: Callable, folder: Path, options: Callable = dict) -> Model:
    """Train without a stop, and again from the checkpoint in the middle: the bits are equal.

    `make` returns a model, given a seed; `options` returns further arguments of the Trainer.
    Returns the model that never stopped.
    """
    first = fit(make(seed=0), folder, **options())
    second = fit(make(seed=ELSEWHERE), folder / "resumed", checkpoint(folder), **options())
    assert_same(second.at_start, first.epochs[SAVED - 1])
    assert_same(second.epochs, first.epochs[SAVED:])
    steps = SAVED * BATCHES
    for ours, theirs in (
        (getattr(x, k) for x in (second, first)) for k in ("lrs", "betas", "norms")
    ):
        assert_same(ours, theirs[-steps:])
    assert (len(first.lrs), len(second.lrs)) == (EPOCHS * BATCHES, steps)
    assert len(set(first.lrs)) > steps  # the scheduler does change it
    return first


@contextmanager
def launched(strategy: Callable, **keywords) -> Iterator[Callable]:
    """Yield a function that returns the arguments of a Trainer on these ranks.

    Lightning takes a variable of theirs away when a run ends: it is back for each Trainer.
    """
    before = dict(os.environ)

    def options() -> dict:
        os.environ.update(before)
        return {"devices": int(before["WORLD_SIZE"]), "strategy": strategy(), **keywords}

    try:
        yield options
    finally:
        os.environ.clear()
        os.environ.update(before)


PRECISIONS = {
    "32-true": (torch.float32, {}),
    "bf16-mixed": (torch.float32, {}),
    "bf16-true": (torch.bfloat16, {"weight_correction_bits": 8}),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer_resumed_from_its_checkpoint_goes_on_with_the_same_bits(precision, tmp_path):
    dtype, keywords = PRECISIONS[precision]
    made = check_cut_off(
        lambda seed: Model(seed, **keywords), tmp_path, lambda: {"precision": precision}
    )
    assert made.epochs[-1]["net.0.weight"]["values"].dtype == dtype
    # Every gradient is larger, and is clipped to this: bfloat16 rounds its parts by 2^-9.
    assert (torch.tensor(made.norms) / CLIP - 1).abs().max() < 2**-7
    assert len(set(made.betas)) > 1


@on_ranks(2)
def train_under_fsdp2(folder, distributed):
    def strategy() -> strategies.ModelParallelStrategy:
        return strategies.ModelParallelStrategy(
            data_parallel_size=2,
            tensor_parallel_size=1,
            save_distributed_checkpoint=distributed,
            process_group_backend="gloo",
        )

    with launched(strategy) as options:
        made = check_cut_off(Sharded, folder, options)
        torch.save(made.epochs[SAVED - 1], folder / f"saved{os.environ['RANK']}")


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_model_parallel_strategy_resumed_from_its_checkpoint_goes_on_with_the_same_bits(
    distributed, standing_ranks, tmp_path
):
    """Checkpoints are folders, to which all ranks write, or single files."""
    train_under_fsdp2(standing_ranks, folder=tmp_path, distributed=distributed)
    saved = checkpoint(tmp_path)
    assert saved.is_dir() == distributed
    if not distributed:  # Lightning reads folders under ModelParallelStrategy only
        resumed = fit(Model(ELSEWHERE), tmp_path / "alone", saved)
        assert_same(resumed.at_start, torch.load(tmp_path / "saved0"))


ZERO3 = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
}
ZERO2_OF_OBJECT = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}


@pytest.mark.parametrize("config", [ZERO2_OF_OBJECT, ZERO3], ids=["object", "named"])
@on_ranks(2)
def test_deepspeed_strategy_resumed_from_its_checkpoint_goes_on_with_the_same_bits(
    config, tmp_path
):
    """On CPUs in the name of GPUs."""

    def strategy() -> strategies.DeepSpeedStrategy:
        # It fills in what the config leaves out.
        config_of_it = deepcopy(config)
        return strategies.DeepSpeedStrategy(process_group_backend="gloo", config=config_of_it)

    with launched(strategy, accelerator=CPUInTheNameOfCUDA()) as options:
        made = check_cut_off(Model, tmp_path, options)
    codes = sum(state["exp_avg"][0].numel() for state in made.epochs[-1]["states"])
    assert sum(gathered(codes)) == 128 * 256 + 1024 * 16
    tags.verify(checkpoint(tmp_path) / "checkpoint")
