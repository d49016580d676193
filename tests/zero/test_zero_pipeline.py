# SPDX-License-Identifier: Apache-2.0
"""Weights that are tied across the stages of a pipeline: all copies take the same steps."""

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups
from muon_in_zero import MUON
from nests import difference
from torch.nn import Linear
from zero_worker import base_optimizer, config, make_engine, through_and_resumed

from zero8 import Adam8bitBlockwise

NAME = "tied_modules.tied.weight"
TIED, DOWN, UP = TiedLayerSpec("tied", Linear, 96, 96), (Linear, 96, 64), (Linear, 64, 96)
# Two ranks to a stage.  Their boundary cuts a block of the weight in the first stage only.
ACROSS, WITHIN = [TIED, DOWN, UP, TIED], [DOWN, UP, TIED, TIED]
BF16_MASTERS = {"bf16_master_weights_and_grads": True}
LAYOUTS = {
    "zero1 offload": config(stage=1),
    "no zero": config(stage=0, offload=None),
    "lion": config(stage=1, optimizer="Lion8bitBlockwise"),
    "muon": config(stage=1, **MUON),
    "bf16": config(stage=1, offload=None, dtype={}) | {"data_types": {"grad_accum_dtype": "fp32"}},
    "bf16 masters": config(stage=1, dtype=BF16_MASTERS),
    "bf16 masters, client": config(stage=1, dtype=BF16_MASTERS),
    "bf16 masters, corrected": config(stage=1, dtype=BF16_MASTERS, weight_correction_bits=8),
}
QUICK = ("zero1 offload",)
STEPS = 3


def engine_of(name, layers=ACROSS):
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(7)
    model = PipelineModule(
        [LayerSpec(*one) if isinstance(one, tuple) else one for one in layers],
        num_stages=2,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    made = LAYOUTS[name] | {"gradient_accumulation_steps": 2}
    if not name.endswith("client"):
        return make_engine(made, model)
    del made["optimizer"]  # of an optimizer that is not told the names
    optimizer = Adam8bitBlockwise(model.parameters(), lr=1e-2, weight_decay=0.0)
    return make_engine(made | {"zero_force_ds_cpu_optimizer": False}, model, optimizer=optimizer)


def train(engine, is_on=False):
    """Take steps, and return the losses."""
    dtype = next(engine.module.parameters()).dtype
    rank = engine.grid.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * is_on + rank)
    batches = iter(torch.randn(2 * STEPS, 2, 4, 96, generator=generator).to(dtype))
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def report(engine):
    rows = base_optimizer(engine).memory_report().rows
    return {row.name: (row.bits, row.reason) for row in rows}


def trained_and_resumed(name, folder):
    """Return the tied weight, the report, and how a resumed run differs from one run."""
    engines = []

    def make():
        engines.append(engine_of(name))
        return engines[-1]

    through, resumed = through_and_resumed(make, train, folder)
    return through["parameters"][NAME], report(engines[0]), difference(through, resumed)


def within_one_stage():
    engine = engine_of("zero1 offload", WITHIN)
    train(engine)
    return report(engine)


def outcomes(names, folder):
    try:
        found = {
            name: trained_and_resumed(name, f"{folder}/{number}")
            for number, name in enumerate(names)
        }
        return found, within_one_stage()
    finally:
        groups.mpu = None  # DeepSpeed does not forget it


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_zero_weights_tied_across_pipeline_stages_stay_equal_and_resume_with_the_same_bits(
    names, standing_ranks, tmp_path
):
    ranks = standing_ranks(4).run(outcomes, names=names, folder=str(tmp_path), timeout_s=300)
    for name in names:
        of_ranks = [found[name] for found, _ in ranks]
        weight = of_ranks[0][0]
        assert all(torch.equal(weight, other) for other, _, _ in of_ranks), name
        rows = [rows[NAME] for _, rows, _ in of_ranks if NAME in rows]
        assert set(rows) == {(32, "tied across pipeline stages")}, name
        assert [different for _, _, different in of_ranks] == [""] * 4, name
    rows = [rows[NAME] for _, rows in ranks if NAME in rows]
    assert {bits for bits, _ in rows} == {8}  # one weight, with one state
