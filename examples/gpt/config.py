# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed JSON config of a run: one file for both optimizers, one word apart."""

import json
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from examples.gpt.engine import keywords_of


def load_config(path: Path, optimizer: str, steps: int, codec: str | None = None) -> dict:
    """Return the config at `path` with this optimizer, and the schedule of so many steps.

    `total_num_steps` is that of a run, whatever the file says, and so is the codec, if given.

    Raises:
        ValueError: if the config is of another optimizer.
    """
    config = json.loads(path.read_text())
    section = config.get("optimizer", {})
    params = keywords_of(section.get("params", {}), section.get("type"), optimizer, codec, path)
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    is_on_gpu = (
        offload.get("device", "none") == "none" and get_accelerator().device_name() == "cuda"
    )
    if optimizer == "AdamW" and is_on_gpu:
        # DeepSpeed's FusedAdam would need the CUDA toolkit that torch was built with.
        params = {**params, "torch_adam": True}
    if optimizer == "SGD":  # torch's, which DeepSpeed has not tested under ZeRO
        params = {**params, "fused": True}
        config["zero_allow_untested_optimizer"] = True
    config["optimizer"] = {"type": optimizer, "params": params}
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return config
