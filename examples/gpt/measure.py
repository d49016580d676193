# SPDX-License-Identifier: Apache-2.0
"""What a run costs: bytes of states and weights, memory of host and GPU."""

import resource

import torch

from examples.gpt.int8_weights import components, is_int8
from zero8.state.extent import local


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the element-wise sum over all ranks, by way of tensors on `device`."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.tolist()


def memory(optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """Return the bytes of states and of weights over all ranks, and the peaks of memory.

    `state_bytes_per_param` is over the elements that zero8's optimizer keeps in few bits, or over
    all of an fp32 one; None where there are none.  Bytes of weights are those of float32 masters
    where there are some; None where no states are in memory: before the first step, and on NVMe.
    """
    states = {local(p): state for p, state in optimizer.state.items() if state}
    if hasattr(optimizer, "memory_report"):
        rows = [(r.state_bytes, r.numel, r.bits < 32) for r in optimizer.memory_report().rows]
    else:
        rows = [(_bytes(state.values()), p.numel(), True) for p, state in states.items()]
    weights = [t for p in states for t in (components(p).values() if is_int8(p) else [p])]
    sums = [sum(size for size, _, own in rows if own), sum(n for _, n, own in rows if own)]
    sums += [sum(size for size, _, _ in rows), sum(n for _, n, _ in rows)]
    sums += [_bytes(weights), sum(p.numel() for p in states)]
    sums += [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    own, own_numel, size, numel, weight, weight_numel, peak = sum_over_ranks(sums, device)
    on_gpu = device.type == "cuda"
    return {
        "weight_bytes_per_param": weight / weight_numel if weight_numel else None,
        "state_bytes_per_param": own / own_numel if own_numel else None,
        "state_bytes": int(size),
        "state_numel": int(numel),
        "host_peak_gib": peak / 2**30,
        "gpu_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
    }


def _bytes(values) -> int:
    return sum(local(value).nbytes for value in values if torch.is_tensor(value))
