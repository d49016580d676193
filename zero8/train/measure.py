# SPDX-License-Identifier: Apache-2.0
"""What a run costs: optimizer step time, optimizer state bytes, host memory."""

import resource
import statistics
import sys
import time

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

# The first steps allocate the states and fill caches.
WARM_UP_STEPS = 5


class StepTimer:
    """Wall time spent in a base optimizer's own `step()`, in ms, through PyTorch's step hooks.

    ZeRO calls `step()` once per parameter group, so the time adds up until `take_ms`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        """Hook into `optimizer`, the one under ZeRO's wrapper."""
        self._elapsed_ms = 0.0
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_) -> None:
        get_accelerator().synchronize()
        self._started = time.perf_counter()

    def _stop(self, *_) -> None:
        get_accelerator().synchronize()
        self._elapsed_ms += 1e3 * (time.perf_counter() - self._started)

    def take_ms(self) -> float:
        """Return the ms since the last call and start again from zero."""
        elapsed_ms, self._elapsed_ms = self._elapsed_ms, 0.0
        return elapsed_ms


def steady_median(values: list[float]) -> float:
    """Return the median without the warm-up steps (of everything in a run that has only those)."""
    return statistics.median(values[WARM_UP_STEPS:] or values)


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return the element-wise sum over all ranks."""
    device = get_accelerator().current_device_name()
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def state_report(optimizer: torch.optim.Optimizer) -> dict:
    """Count the optimizer's live state tensors over all ranks.

    `state_bytes_per_param` is over the elements that the optimizer holds in its own format (8 bits
    for Adam8bitBlockwise, everything for AdamW), `state_bytes_per_param_all` over everything.
    """
    if hasattr(optimizer, "memory_report"):
        rows = [(r.state_bytes, r.numel, r.bits == 8) for r in optimizer.memory_report().rows]
    else:
        rows = [
            (sum(x.nbytes for x in state.values() if torch.is_tensor(x)), param.numel(), True)
            for param, state in optimizer.state.items()
        ]
    own_bytes, own_numel, all_bytes, all_numel = sum_over_ranks(
        [
            sum(state_bytes for state_bytes, _, own in rows if own),
            sum(numel for _, numel, own in rows if own),
            sum(state_bytes for state_bytes, _, _ in rows),
            sum(numel for _, numel, _ in rows),
        ]
    )
    return {
        # None when min_8bit_size or fp32_params left nothing to 8 bits.
        "state_bytes_per_param": own_bytes / own_numel if own_numel else None,
        "state_bytes_per_param_all": all_bytes / all_numel,
        "state_bytes": int(all_bytes),
        "state_numel": int(all_numel),
    }


def host_peak_gib() -> float:
    """Return the peak resident host memory of all ranks' processes together, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else 1024 * peak
    return sum_over_ranks([peak_bytes])[0] / 2**30
