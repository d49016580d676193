# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed JSON config of a run: one file for both optimizers, one word apart."""

import json
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from examples.gpt.engine import EIGHT_BIT
from zero8.state.keywords import OWN_KEYS


def offload_device(config: dict) -> str:
    """Return where a DeepSpeed config keeps optimizer states: "cpu", "nvme" or "none"."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    return offload.get("device", "none")


def is_stepped_by_torch(config: dict) -> bool:
    """Return whether the AdamW of a run is torch's: on a GPU, without offload.

    DeepSpeed's FusedAdam would need the CUDA toolkit that torch was built with.
    """
    return get_accelerator().device_name() == "cuda" and offload_device(config) == "none"


def load_config(path: Path, optimizer: str, steps: int) -> dict:
    """Return the config at `path` with this optimizer's `type`, and the schedule of so many steps.

    `total_num_steps` is that of a run, whatever the file says.
    """
    config = json.loads(path.read_text())
    section = config.get("optimizer", {})
    if section.get("type") != EIGHT_BIT:
        raise ValueError(
            f"got optimizer type {section.get('type')!r} in {str(path)!r}, expected "
            f'{EIGHT_BIT!r}; write "optimizer": {{"type": "{EIGHT_BIT}", "params": ...}}'
        )
    section["type"] = optimizer
    if optimizer != EIGHT_BIT:
        # DeepSpeed hands every key of "params" to the optimizer, and AdamW does not know these.
        for key in OWN_KEYS:
            section.get("params", {}).pop(key, None)
        if is_stepped_by_torch(config):
            section.setdefault("params", {})["torch_adam"] = True
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return config
