# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupCosineLR

from examples.gpt.engine_fsdp2 import lr_ratio


@pytest.mark.parametrize("total_steps", [4, 40, 41, 100])
def test_schedule_ratio_is_that_of_deepspeeds_warmup_cosine(total_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = WarmupCosineLR(
        optimizer, total_steps, warmup_num_steps=40, warmup_type="linear", cos_min_ratio=0.1
    )
    ours = {"warmup_steps": 40, "min_ratio": 0.1, "total_steps": total_steps}
    for step in range(total_steps + 2):
        assert lr_ratio(step, **ours) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        theirs.step()
