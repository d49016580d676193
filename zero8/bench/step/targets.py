# SPDX-License-Identifier: Apache-2.0
"""Targets for the steps, and whether a result meets them.

Speeds are ratios of medians of one run, relative to DeepSpeed's step of the same algorithm on the
same fp32 tensors unless another optimizer is named.  Limits depend on zero8's instruction set, or
are a GPU's.
"""

from collections.abc import Callable
from operator import itemgetter

from zero8.algorithms.adam import ADAM
from zero8.algorithms.table import ELEMENTWISE, algorithm_called
from zero8.bench.step.variants import BF16, CUDA_VARIANTS, FP32
from zero8.spec.grid import MAX_BLOCK_SIZE

AVX2, AVX512, GPU = "AVX2", "AVX-512", "GPU"

# The least value, by algorithm, variant and codec, and by instruction set (AVX2 includes older
# ones) or GPU.
Limits = dict[tuple[str, str, str], dict[str, float]]
SPEED_OVER_FP32: Limits = {
    (ADAM.name, FP32.name, "log"): {AVX2: 1.3, AVX512: 1.5},
    (ADAM.name, BF16.name, "log"): {AVX2: 1.4, AVX512: 2.05},
    (ADAM.name, FP32.name, "dynamic"): {AVX2: 0.6, AVX512: 1.0},
}
# Over DeepSpeed's own bf16 states, the alternative for bf16 weights.
SPEED_OVER_BF16_STATES: Limits = {(ADAM.name, BF16.name, "log"): {AVX2: 3.0, AVX512: 1.0}}
FRACTION_OF_STREAM: Limits = {
    **{(one.name, FP32.name, "log"): {AVX2: 0.6, AVX512: 0.85} for one in ELEMENTWISE},
    **{(ADAM.name, v.name, "log"): {GPU: 0.85} for v in CUDA_VARIANTS},
    (ADAM.name, FP32.name, "log"): {AVX2: 0.75, AVX512: 0.95, GPU: 0.85},
}
# By algorithm, variant and package: speed of the default codec over it.
SPEED_OVER: Limits = {
    (ADAM.name, FP32.name, "torch"): {AVX2: 1.6, AVX512: 1.6, GPU: 1.5},
    (ADAM.name, FP32.name, "torchao"): {AVX2: 40, AVX512: 40},
    (ADAM.name, FP32.name, "bitsandbytes"): {AVX2: 80, AVX512: 80, GPU: 1.4},
    (ADAM.name, BF16.name, "bitsandbytes"): {GPU: 1.4},
}
LIST_OVER_FLAT = 1.15
# On a GPU, whose cache holds smaller ones.
LEAST_NUMEL_ON_GPU = 2**26

# Two blocks of a moment, or of a denominator, in float32; 64 pages that Linux may count late.
EXTRA_BYTES_PER_MOMENT = 2 * 4 * MAX_BLOCK_SIZE
PAGES_UNCOUNTED = 64


def checks(result: dict) -> list[dict]:
    """Return value, limit and whether it is met, for every target whose rows were measured."""
    rows = result["rows"]
    on_gpu = "gpu" in result["machine"]
    if on_gpu and result["numel"] < LEAST_NUMEL_ON_GPU:
        return []
    by_isa = (
        ("speed over DeepSpeed's fp32", SPEED_OVER_FP32, itemgetter("ratio_vs_deepspeed_fp32")),
        (
            "speed over DeepSpeed's bf16 states",
            SPEED_OVER_BF16_STATES,
            lambda row: _speed_over(rows, row, "deepspeed", BF16.name),
        ),
        ("fraction of its own stream", FRACTION_OF_STREAM, itemgetter("fraction_of_stream")),
    )
    found = [check for case in by_isa for check in _checks_by_isa(rows, *case)]
    found += _peer_checks(rows, result["default"])
    if on_gpu:
        measured = {row["variant"] for row in rows if row["name"] == "zero8"}
        return [at_least("pairs of dtypes measured", len(measured), len(CUDA_VARIANTS)), *found]
    listed = result["tensor_list"]
    target = f"{listed['tensors']} tensors, time over that of one"
    return [*found, at_most(target, listed["ratio"], LIST_OVER_FLAT), *_memory_checks(result)]


def at_least(target: str, value: float, limit: float) -> dict:
    """Return a check of a value that must not be under its limit."""
    return {
        "target": f"{target}, at least",
        "value": value,
        "limit": limit,
        "met": value >= limit,
    }


def at_most(target: str, value: float, limit: float) -> dict:
    """Return a check of a value that must not be over its limit."""
    return {"target": f"{target}, at most", "value": value, "limit": limit, "met": value <= limit}


def _row(rows: list[dict], name: str, *step: str | None) -> dict | None:
    """Return the row of zero8 or a package, of an algorithm, variant and codec; None if none is."""
    keys = ("name", "algorithm", "variant", "codec")
    return next((r for r in rows if tuple(r[key] for key in keys) == (name, *step)), None)


def _speed_over(rows: list[dict], row: dict, name: str, variant: str) -> float | None:
    """Return a row's speed over a peer's of its algorithm, None if that was not measured."""
    peer = _row(rows, name, row["algorithm"], variant, None)
    return peer["ns_per_param"] / row["ns_per_param"] if peer else None


def _checks_by_isa(
    rows: list[dict],
    what: str,
    limits: Limits,
    value_of: Callable[[dict], float | None],
) -> list[dict]:
    found = []
    for (algorithm, variant, codec), limit_by_isa in limits.items():
        row = _row(rows, "zero8", algorithm, variant, codec)
        value = value_of(row) if row else None
        if value is not None and (isa := _kind(row["isa"])) in limit_by_isa:
            target = f"zero8 {algorithm} {variant} `{codec}`, {what}, {isa}"
            found.append(at_least(target, value, limit_by_isa[isa]))
    return found


def _kind(isa: str) -> str:
    """Return the kind of instruction set that has limits, or the name of one that has none."""
    return AVX512 if isa.startswith("avx512") else {"cuda": GPU, "avx2": AVX2}.get(isa, isa)


def _peer_checks(rows: list[dict], default: str) -> list[dict]:
    found = []
    for (algorithm, variant, name), limit_by_isa in SPEED_OVER.items():
        ours = _row(rows, "zero8", algorithm, variant, default)
        value = _speed_over(rows, ours, name, variant) if ours else None
        if value is not None and (isa := _kind(ours["isa"])) in limit_by_isa:
            target = f"zero8 {algorithm} {variant} `{default}` (default), speed over {name}'s"
            found.append(at_least(target, value, limit_by_isa[isa]))
    return found


def _memory_checks(result: dict) -> list[dict]:
    extra = [row["extra_bytes"] for row in result["rows"] if row["name"] == "zero8"]
    if None in extra:
        return []
    pages = PAGES_UNCOUNTED * result["machine"]["page_bytes"]
    arrays = 1 + max(len(algorithm_called(name).moments) for name in result["algorithms"])
    limit = result["threads"] * (arrays * EXTRA_BYTES_PER_MOMENT + pages)
    return [at_most("zero8, bytes of memory that a step takes and returns", max(extra), limit)]
