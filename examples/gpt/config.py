# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed JSON config of a run: one file for both optimizers, one word apart."""

import json
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from examples.gpt.engine import eight_bit_of
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


def load_config(path: Path, optimizer: str, steps: int, codec: str | None = None) -> dict:
    """Return the config at `path` with this optimizer's `type`, and the schedule of so many steps.

    `total_num_steps` is that of a run, whatever the file says, and so is the codec, if given.
    """
    config = json.loads(path.read_text())
    section, eight_bit = config.get("optimizer", {}), eight_bit_of(optimizer)
    if section.get("type") != eight_bit:
        raise ValueError(
            f"got optimizer type {section.get('type')!r} in {str(path)!r}, expected "
            f'{eight_bit!r}; write "optimizer": {{"type": "{eight_bit}", "params": ...}}'
        )
    section["type"] = optimizer
    if optimizer == eight_bit and codec is not None:
        section.setdefault("params", {})["codec"] = codec
    if optimizer != eight_bit:
        # DeepSpeed hands every key of "params" to the optimizer, and the twin does not know these.
        for key in OWN_KEYS:
            section.get("params", {}).pop(key, None)
    if optimizer == "AdamW" and is_stepped_by_torch(config):
        section.setdefault("params", {})["torch_adam"] = True
    if optimizer == "SGD":  # torch's, which DeepSpeed has not tested under ZeRO
        section.setdefault("params", {})["fused"] = True
        config["zero_allow_untested_optimizer"] = True
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return config
