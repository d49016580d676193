# SPDX-License-Identifier: Apache-2.0
"""The GPU to measure on, if there is one."""

import shutil
import subprocess

import torch


def absence() -> str | None:
    """Return why no GPU can be used, None if one can."""
    if torch.cuda.is_available():
        return None
    cuda = torch.version.cuda
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    return (
        f"looked for a CUDA device with torch {torch.__version__} ({built}) and found none; "
        f"nvidia-smi: {_nvidia_smi('name,driver_version') or 'not there, or without a GPU'}"
    )


def machine() -> dict:
    """Describe the GPU, its memory and its software."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": _nvidia_smi("driver_version"),
        "cuda": torch.version.cuda,
    }


def _nvidia_smi(fields: str) -> str | None:
    """Return fields of the first GPU, None if nvidia-smi fails."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    command = [path, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
