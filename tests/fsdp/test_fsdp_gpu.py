# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on GPUs, parameters there or kept in page-locked memory: the bits of one process's CPU."""

import pytest
import torch
from fsdp_checkpoints import MODES, resume, save_all
from fsdp_worker import LAYOUTS, differing, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICE = "cuda"
WORLD_SIZES = sorted({1, max(1, torch.cuda.device_count())})
STEPS, MORE = 3, 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("way", ["after the backward", "in the backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_fsdp2_step_has_the_bits_of_one_process_on_the_cpu(
    layout, way, world_size, standing_ranks
):
    arguments = {"layout": layout, "steps": 4, "way": way}
    for got in standing_ranks(world_size, DEVICE).run(trained, **arguments):
        assert differing(got, trained(layout, 4, "alone"), world_size) == []


@pytest.fixture(scope="module")
def saved(standing_ranks, tmp_path_factory):
    """Return a function: of a layout, the folder and results of `save_all`."""
    made = {}

    def of(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp("checkpoints")
            arguments = {"layout": layout, "folder": folder, "steps": STEPS, "more": MORE}
            (every,) = standing_ranks(1, DEVICE).run(save_all, **arguments)
            made[layout] = folder, every
        return made[layout]

    return of


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["corrected", "offload"])
@pytest.mark.parametrize("device", [DEVICE, "cpu"])
def test_gpu_fsdp2_checkpoint_loads_on_both_devices_and_goes_on_with_the_same_bits(
    device, layout, mode, saved, standing_ranks
):
    folder, expected = saved(layout)
    arguments = {"layout": layout, "folder": folder, "mode": mode, "steps": STEPS, "more": MORE}
    (got,) = standing_ranks(1, device).run(resume, **arguments)
    for ours, theirs in zip(got, expected, strict=True):
        assert differing(ours, theirs) == []
