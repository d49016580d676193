# SPDX-License-Identifier: Apache-2.0
"""What a run costs: optimizer step time, optimizer state bytes, memory of host and GPU."""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from examples.gpt.int8_weights import components, is_int8
from zero8.state.extent import local

# The first steps allocate the states and fill caches.
WARM_UP_STEPS = 5


class StepTimer:
    """Wall time spent in a base optimizer's own `step()`, in ms, through PyTorch's step hooks.

    ZeRO calls `step()` once per parameter group, so the time adds up until `take_ms`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, synchronize: Callable[[], None]):
        """Hook into `optimizer`, the one that steps; `synchronize` waits for its device."""
        self._elapsed_ms = 0.0
        self._synchronize = synchronize
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_) -> None:
        self._synchronize()
        self._started = time.perf_counter()

    def _stop(self, *_) -> None:
        self._synchronize()
        self._elapsed_ms += 1e3 * (time.perf_counter() - self._started)

    def take_ms(self) -> float:
        """Return the ms since the last call and start again from zero."""
        elapsed_ms, self._elapsed_ms = self._elapsed_ms, 0.0
        return elapsed_ms


def steady_median(values: list[float]) -> float:
    """Return the median without the warm-up steps (of everything in a run that has only those)."""
    return statistics.median(values[WARM_UP_STEPS:] or values)


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the element-wise sum over all ranks, by way of tensors on `device`."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def state_report(optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """Count the optimizer's live state tensors over all ranks.

    `state_bytes_per_param` is over the elements that the optimizer holds in its own format (8 bits
    for zero8's, everything for an fp32 one), `state_bytes_per_param_all` over everything.
    """
    if hasattr(optimizer, "memory_report"):
        rows = [(r.state_bytes, r.numel, r.bits < 32) for r in optimizer.memory_report().rows]
    else:
        rows = [
            (sum(map(_bytes_here, state.values())), local(param).numel(), True)
            for param, state in optimizer.state.items()
        ]
    own_bytes, own_numel, all_bytes, all_numel = sum_over_ranks(
        [
            sum(state_bytes for state_bytes, _, own in rows if own),
            sum(numel for _, numel, own in rows if own),
            sum(state_bytes for state_bytes, _, _ in rows),
            sum(numel for _, numel, _ in rows),
        ],
        device,
    )
    return {
        # None when min_8bit_size or fp32_params left nothing to 8 bits.
        "state_bytes_per_param": own_bytes / own_numel if own_numel else None,
        "state_bytes_per_param_all": all_bytes / all_numel,
        "state_bytes": int(all_bytes),
        "state_numel": int(all_numel),
    }


def weight_bytes_per_param(optimizer: torch.optim.Optimizer, device: torch.device) -> float | None:
    """Return the bytes per element of the weights that the optimizer steps, over all ranks.

    Where 16-bit weights have float32 masters, these are counted.  The result is None where states
    are on NVMe, as weights are then in memory during a step alone.
    """
    weights = [local(param) for param, state in optimizer.state.items() if state]
    parts = [
        part
        for weight in weights
        for part in (components(weight).values() if is_int8(weight) else [weight])
    ]
    num_bytes, numel = sum_over_ranks(
        [sum(part.nbytes for part in parts), sum(weight.numel() for weight in weights)], device
    )
    return num_bytes / numel if numel else None


def _bytes_here(value: object) -> int:
    """Return the bytes that this rank holds of an entry of a state, 0 of what is no tensor."""
    return local(value).nbytes if torch.is_tensor(value) else 0


def host_peak_gib(device: torch.device) -> float:
    """Return the peak resident host memory of all ranks' processes together, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else 1024 * peak
    return sum_over_ranks([peak_bytes], device)[0] / 2**30


def gpu_peak_gib(device: torch.device) -> float | None:
    """Return the most memory that tensors took on one rank's GPU, in GiB; None on the CPU."""
    if device.type != "cuda":
        return None
    peak_bytes = torch.tensor(torch.cuda.max_memory_allocated(device), device=device)
    torch.distributed.all_reduce(peak_bytes, torch.distributed.ReduceOp.MAX)
    return peak_bytes.item() / 2**30
