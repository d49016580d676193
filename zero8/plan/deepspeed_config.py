# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a run from a DeepSpeed config."""

from dataclasses import replace

from zero8.optimizer.muon import ADAM_PARAMS
from zero8.plan.setup import BY_NAME, Setup
from zero8.spec.codec import DEFAULT_CODEC
from zero8.state.policy import Policy


def with_deepspeed_config(setup: Setup, config: dict) -> Setup:
    """Return a setup with the settings of a DeepSpeed config."""
    zero = config.get("zero_optimization", {})
    offload = zero.get("offload_optimizer") or {}
    params_on = (zero.get("offload_param") or {}).get("device", "none")
    if config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise ValueError("grad_accum_dtype: got 'fp32', which is not supported; leave it out")
    if params_on == "nvme":
        raise ValueError("offload_param: got device 'nvme', which is not supported")
    found = {
        "stage": zero.get("stage", 0),
        "offload": offload.get("device", "none"),
        "offload_params": params_on != "none",
        "dtype": _dtype(config),
        "overlap_comm": zero.get("overlap_comm") is True,
        "buffer_count": offload.get("buffer_count", setup.buffer_count),
        "pipelined": bool(offload.get("pipeline_read") and offload.get("pipeline_write")),
    }
    for name, value in (
        ("accumulation_steps", config.get("gradient_accumulation_steps")),
        ("reduce_bucket_numel", zero.get("reduce_bucket_size")),
        ("sub_group_numel", zero.get("sub_group_size")),
        ("max_live_numel", zero.get("stage3_max_live_parameters")),
    ):
        # The Hugging Face Trainer fills in "auto" later, here it is DeepSpeed's default.
        if isinstance(value, int | float):
            found[name] = int(value)
    return replace(setup, **found, **_of_optimizer(config.get("optimizer", {})))


def _dtype(config: dict) -> str:
    bf16, optimizer = config.get("bf16", {}), config.get("optimizer", {})
    if not bf16.get("enabled"):
        return "fp16" if config.get("fp16", {}).get("enabled") else "fp32"
    if not bf16.get("bf16_master_weights_and_grads"):
        return "bf16"
    has_more_bits = optimizer.get("params", {}).get("weight_correction_bits")
    return (
        "24-bit-masters" if optimizer.get("type") in BY_NAME and has_more_bits else "bf16-masters"
    )


def _of_optimizer(section: dict) -> dict:
    if section.get("type") not in BY_NAME:
        return {}
    params = section.get("params", {})
    keys = ("block_size", "min_8bit_size", "fp32_params")
    return {
        "algorithm_name": BY_NAME[section["type"]].algorithm.name,
        "codec": params.get("codec", DEFAULT_CODEC),
        "policy": Policy(**{key: params[key] for key in keys if key in params}),
        "adam_params": tuple(params.get("adam_params", ADAM_PARAMS)),
    }
