# SPDX-License-Identifier: Apache-2.0
"""Muon under ZeRO: steps of one process in every stage."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from muon_in_zero import IN_FLOAT32, LAYOUTS, OF_DEEPSPEED, WithoutFilters, results
from muon_worker import STEPS, Known, alone, wrong
from zero_worker import base_optimizer, config, make_engine, parameters_of, take_step

QUICK = ("no zero", "zero2 offload", "zero3 offload, parts")


def moved(optimizer: str, stage: int, **options) -> dict:
    """Return by parameter how far some steps have moved it."""
    ds_config = config(
        stage=stage,
        zero={"reduce_scatter": stage < 3},  # DeepSpeed refuses it in stage 3
        optimizer=optimizer,
        **OF_DEEPSPEED,
        **options,
    )
    engine = make_engine(ds_config, WithoutFilters())
    # Else DeepSpeed would orthogonalize in float16.
    get_accelerator().is_fp16_supported = lambda: False
    before = parameters_of(engine)
    with torch.compiler.set_stance("force_eager"):  # DeepSpeed's would compile for half a minute
        for step in range(STEPS):
            take_step(engine, step)
    return {name: after - before[name] for name, after in parameters_of(engine).items()}


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(
            layout, size, marks=[] if layout in QUICK and size == 2 else [pytest.mark.slow]
        )
        for layout in LAYOUTS
        for size in (1, 2, 3)
    ],
)
def test_zero_muon_steps_are_those_of_one_process(layout, world_size, standing_ranks):
    expected = alone()
    for got, use_muon in standing_ranks(world_size).run(trained, layout=layout):
        assert wrong(got, expected) == []
        assert set(use_muon) == {True, False}


def trained(layout: str) -> tuple[dict, list]:
    """Return `results` after some steps, and the groups' use_muon."""
    engine = make_engine(LAYOUTS[layout], Known())
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):  # which must not change what the step computes
            take_step(engine, step)
    return results(engine), [group["use_muon"] for group in base_optimizer(engine).param_groups]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_muon_steps_are_those_of_deepspeeds(stage, standing_ranks):
    """Newton-Schulz multiplies what is small by up to 3.4445^5 = 485 in its five iterations.

    So errors of 2^-24 in the sums of up to 512 products become sqrt(512) * 485 * 2^-24 = 6.5e-4 of
    the largest entries at most.  Adam's are a few roundings.
    """
    ranks = standing_ranks(2)
    (theirs, *_) = ranks.run(moved, timeout_s=400, optimizer="Muon", stage=stage)
    (ours, *_) = ranks.run(moved, optimizer="Muon8bitBlockwise", stage=stage, **IN_FLOAT32)
    for name, expected in theirs.items():
        distance = (ours[name] - expected).norm() / expected.norm()
        assert distance < 6.5e-4, name
