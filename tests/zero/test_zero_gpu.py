# SPDX-License-Identifier: Apache-2.0
"""ZeRO on GPUs, without offload and with it: the bits of the plain optimizer on the CPU.

The gradients of `Bag` are exact, so they do not depend on the device.  Those of the matrix do: its
cells follow fp32 AdamW on the same GPU, and resume as it does.
"""

import pytest
import test_zero_layouts as layouts
import test_zero_matrix as matrix
import torch
from zero_worker import config

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
WORLD_SIZE = max(1, torch.cuda.device_count())
PAGE_LOCKED = {"device": "cpu", "pin_memory": True}


def page_locked(stage, zero=None, **options):
    zero = {"offload_optimizer": PAGE_LOCKED, **(zero or {})}
    return config(stage, zero=zero, offload=None, **options)


LAYOUTS = layouts.LAYOUTS | {
    "zero1 page-locked": page_locked(1),
    "zero2 page-locked, bf16": page_locked(2, dtype={}),
    "zero2 page-locked, accumulated": page_locked(2) | {"gradient_accumulation_steps": 2},
    "zero3 page-locked, bf16": page_locked(3, dtype={}),
    "zero2 bf16, overlapped": config(2, offload=None, dtype={}, zero={"overlap_comm": True}),
    "zero3 page-locked, bf16, parameters too": page_locked(
        3, dtype={}, zero={"offload_param": PAGE_LOCKED}
    ),
}
CELLS = (
    "zero0_bf16",
    "zero1_bf16",
    "zero1_accum32",
    "zero1_cpu_bf16",
    "zero2_bf16",
    "zero2_fp16",
    "zero2_overlap",
    "zero2_cpu_bf16",
    "zero3_states",
    "zero3_bf16",
    "zero3_cpu_bf16",
)
CHECKS = (*matrix.CHECKS[:4], matrix.check_destroyed)


@pytest.fixture(scope="module")
def stepped(standing_ranks):
    """What each rank holds after steps in all layouts."""
    return standing_ranks(WORLD_SIZE, DEVICE).run(
        layouts.step_layouts, timeout_s=300, layouts=LAYOUTS | layouts.WITHOUT_ZERO
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_gpu_layout_equals_plain_optimizer_on_the_cpu_in_uncut_blocks(stepped, name):
    ranks = [held[name] for held in stepped]
    layouts.assert_equals_reference(ranks, name, LAYOUTS[name], cut_per_param=WORLD_SIZE - 1)


@pytest.mark.parametrize("name", layouts.WITHOUT_ZERO)
def test_gpu_layout_without_zero_equals_plain_optimizer_on_the_cpu(stepped, name):
    layouts.assert_each_equals_reference([held[name] for held in stepped], name)


@pytest.mark.parametrize("name", CELLS)
def test_gpu_cell_of_the_matrix(name, standing_ranks, tmp_path):
    ranks = standing_ranks(1, DEVICE).run(matrix.run_cell, name=name, folder=str(tmp_path))
    for check in CHECKS:
        check(matrix.CELLS[name], ranks)
