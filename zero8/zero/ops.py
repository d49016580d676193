# SPDX-License-Identifier: Apache-2.0
"""The ops of DeepSpeed that an engine needs, and building them before it starts."""

import time

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

SHARED_MEMORY = "ShareMemCommBuilder"

# The builders of DeepSpeed's optimizers, with and without offload; None if torch's is used.
_ADAM = ("CPUAdamBuilder", "FusedAdamBuilder")
_OPTIMIZERS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "muon": _ADAM,
    "lion": ("CPULionBuilder", "FusedLionBuilder"),
    "adagrad": ("CPUAdagradBuilder", None),
    "lamb": ("FusedLambBuilder", "FusedLambBuilder"),
}


def needed(config: dict, accelerator: str) -> list[str]:
    """Return the builders of the ops of DeepSpeed that an engine with this config loads.

    Args:
        config: DeepSpeed's JSON config.
        accelerator: the result of `accelerator`.
    """
    zero = config.get("zero_optimization", {})
    devices = {
        part: (zero.get(f"offload_{part}") or {}).get("device", "none")
        for part in ("optimizer", "param")
    }
    names = [SHARED_MEMORY] if accelerator == "cpu" else []
    section = config.get("optimizer") or {}
    if not (section.get("params") or {}).get("torch_adam"):
        offloaded, resident = _OPTIMIZERS.get(section.get("type", "").lower(), (None, None))
        names.append(resident if devices["optimizer"] == "none" else offloaded)
    if "nvme" in devices.values():
        names += ["PinMemoryBuilder", "AsyncIOBuilder"]
    return [name for name in names if name]


def accelerator() -> str:
    """Return the name of DeepSpeed's accelerator: "cpu", "cuda", ..."""
    return get_accelerator().device_name()


def check(names: list[str]) -> None:
    """Raise RuntimeError, saying what to install, if one of these ops cannot be built."""
    if "AsyncIOBuilder" in names and (missing := missing_for_nvme()):
        raise RuntimeError(missing)


def build(name: str) -> dict:
    """Build an op of DeepSpeed, named by its builder, unless it is built, and load it.

    Returns:
        "op", its name; "path" of its library; "seconds" taken.

    Raises:
        RuntimeError: if it cannot be built.
    """
    builder = get_accelerator().create_op_builder(name)
    began = time.perf_counter()
    path = builder.load(verbose=False).__file__
    return {"op": builder.name, "path": path, "seconds": round(time.perf_counter() - began, 3)}


def missing_for_nvme() -> str | None:
    """Return what this machine lacks for optimizer states on a disk, or None."""
    # DeepSpeed's own test; AsyncIOBuilder.is_compatible would also print advice.
    if get_accelerator().create_op_builder("AsyncIOBuilder").has_function("io_submit", ("aio",)):
        return None
    return (
        'offload_optimizer.device "nvme" needs libaio and its headers; Debian and Ubuntu: '
        "apt-get install libaio-dev"
    )


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling an all_reduce that it does not call under torchrun.

    DeepSpeed uses it only if its own launcher has set LOCAL_SIZE.
    """
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
