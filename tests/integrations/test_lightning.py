# SPDX-License-Identifier: Apache-2.0
"""Lightning: `configure_optimizers`, its checkpoints, and its strategies for sharded models."""

import importlib

import pytest
import torch
from nests import difference

from zero8.files import tags

pytestmark = pytest.mark.integrations

NUMEL = {"net.0.weight": 128 * 256, "net.3.weight": 1024 * 16}
PRECISIONS = {
    "32-true": (torch.float32, {}),
    "bf16-mixed": (torch.float32, {}),
    "bf16-true": (torch.bfloat16, {"weight_correction_bits": 8}),
}
AS_OBJECT = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
NAMED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "Adam8bitBlockwise", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
}


@pytest.fixture(scope="module")
def worker():
    """The module of the small models; it imports Lightning."""
    return importlib.import_module("lightning_worker")


def assert_went_on(runs, worker):
    """The second run begins with the bits of the checkpoint, and ends with those of the first."""
    first, second = runs["never stopped"], runs["resumed"]
    steps = worker.SAVED * worker.BATCHES
    assert len(first["lrs"]) == worker.EPOCHS * worker.BATCHES
    assert difference(second["at_start"], first["epochs"][worker.SAVED - 1]) == ""
    assert difference(second["epochs"], first["epochs"][worker.SAVED :]) == ""
    for key in ("lrs", "betas", "norms"):
        assert second[key] == first[key][-len(second["lrs"]) :]
    assert len(second["lrs"]) == steps
    assert len(set(first["lrs"])) > steps  # the scheduler does change it


@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer_resumed_from_its_checkpoint_goes_on_with_the_same_bits(
    precision, worker, tmp_path
):
    dtype, keywords = PRECISIONS[precision]

    def make(seed):
        return worker.Model(seed, **keywords)

    runs = worker.cut_off(make, tmp_path, lambda: {"precision": precision})
    assert_went_on(runs, worker)
    assert runs["never stopped"]["epochs"][-1]["net.0.weight"]["values"].dtype == dtype
    # Every gradient is larger, and is clipped to this: bfloat16 rounds its parts by 2^-9.
    norms = torch.tensor(runs["never stopped"]["norms"])
    assert (norms / worker.CLIP - 1).abs().max() < 2**-7
    assert len(set(runs["never stopped"]["betas"])) > 1


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
def test_model_parallel_strategy_resumed_from_its_checkpoint_goes_on_with_the_same_bits(
    distributed, worker, standing_ranks, tmp_path
):
    run = standing_ranks(2).run
    for rank in run(worker.under_fsdp2, folder=tmp_path, distributed=distributed):
        assert_went_on(rank, worker)
    saved = worker.checkpoint(tmp_path)
    assert saved.is_dir() == distributed
    if not distributed:  # Lightning reads folders under ModelParallelStrategy only
        resumed = worker.fit(worker.Model(worker.ELSEWHERE), tmp_path / "alone", saved)
        expected = rank["never stopped"]["epochs"][worker.SAVED - 1]
        assert difference(resumed.at_start, expected) == ""


def test_trainer_of_float16_weights_is_refused_with_what_to_do_instead(worker, tmp_path):
    with pytest.raises(ValueError, match="dtype torch.float16.* keep float32 weights"):
        worker.fit(worker.Model(), tmp_path, precision="16-true")


@pytest.mark.parametrize("config", [AS_OBJECT, NAMED], ids=["object", "named"])
def test_deepspeed_strategy_resumed_from_its_checkpoint_goes_on_with_the_same_bits(
    config, worker, standing_ranks, tmp_path
):
    codes = 0
    for rank in standing_ranks(2).run(worker.under_zero, folder=tmp_path, config=config):
        assert_went_on(rank, worker)
        states = rank["never stopped"]["epochs"][-1]["states"]
        codes += sum(state["exp_avg"][0].numel() for state in states)
    assert codes == sum(NUMEL.values())
    assert tags.verify(worker.checkpoint(tmp_path) / "checkpoint")
