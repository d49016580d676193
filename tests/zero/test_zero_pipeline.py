# SPDX-License-Identifier: Apache-2.0
"""Weights that are tied across the stages of a pipeline: all copies take the same steps."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups
from muon_in_zero import MUON
from nests import assert_same
from params import each
from ranks import on_ranks
from torch.nn import Linear
from zero_worker import BF16_MASTERS, base_optimizer, config, make_engine, through_and_resumed

from zero8 import Adam8bitBlockwise
from zero8.environment.ranks import gathered

NAME = "tied_modules.tied.weight"
TIED, DOWN, UP = TiedLayerSpec("tied", Linear, 96, 96), (Linear, 96, 64), (Linear, 64, 96)
# Two ranks to a stage.  Their boundary cuts a block of the weight in the first stage only.
ACROSS, WITHIN = [TIED, DOWN, UP, TIED], [DOWN, UP, TIED, TIED]
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
    made, optimizer = LAYOUTS[name] | {"gradient_accumulation_steps": 2}, None
    if name.endswith("client"):  # of an optimizer that is not told the names
        del made["optimizer"]
        made["zero_force_ds_cpu_optimizer"] = False
        optimizer = Adam8bitBlockwise(model.parameters(), lr=1e-2, weight_decay=0.0)
    try:
        return make_engine(made, model, optimizer=optimizer)
    finally:
        groups.mpu = None  # DeepSpeed does not forget it


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


@each(LAYOUTS, [name for name in LAYOUTS if name != "zero1 offload"])
@on_ranks(4)
def test_zero_weights_tied_across_pipeline_stages_stay_equal_and_resume_with_the_same_bits(
    name, tmp_path
):
    engines = []

    def make():
        engines.append(engine_of(name))
        return engines[-1]

    through, resumed = through_and_resumed(make, train, tmp_path)
    assert_same(through, resumed)
    found = gathered((through["parameters"][NAME], report(engines[0])))
    for weight, rows in found:
        assert_same(weight, found[0][0])
        assert rows.get(NAME) in (None, (32, "tied across pipeline stages"))
    assert any(NAME in rows for _, rows in found)


@on_ranks(4)
def test_zero_weight_tied_within_a_pipeline_stage_has_one_state():
    engine = engine_of("zero1 offload", WITHIN)
    train(engine)
    rows = [rows[NAME] for rows in gathered(report(engine)) if NAME in rows]
    assert {bits for bits, _ in rows} == {8}
