# SPDX-License-Identifier: Apache-2.0
"""How a run under DeepSpeed looks for the checkpoint to go on from."""

import deepspeed
import pytest

from examples.gpt import engine_deepspeed


def test_resume_has_a_gpu_to_each_rank_before_the_first_collective(monkeypatch, tmp_path):
    """NCCL would else see the first GPU in every rank; DeepSpeed sets it later."""
    calls = []

    def collective(function):
        calls.append("collective")
        raise KeyboardInterrupt  # far enough

    accelerator = engine_deepspeed.get_accelerator()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(accelerator, "set_device", calls.append, raising=False)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda: calls.append("init"))
    monkeypatch.setattr(engine_deepspeed, "from_rank_0", collective)
    with pytest.raises(KeyboardInterrupt):
        engine_deepspeed.DeepSpeedEngine(None, {}, 1, tmp_path)
    assert calls == [3, "init", "collective"]
