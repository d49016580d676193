# SPDX-License-Identifier: Apache-2.0
"""What the steps are held to, and whether a result meets it.

Speeds are ratios of medians of one run, against DeepSpeedCPUAdam on the same fp32 tensors unless
another optimizer is named.  Limits depend on the instruction set that zero8 stepped with.
"""

from collections.abc import Callable
from operator import itemgetter

from zero8.bench.step.variants import BF16, FP32
from zero8.spec.grid import MAX_BLOCK_SIZE

# By variant and codec: the least speed on AVX2 (and below), and on AVX-512.
SPEED_OVER_FP32 = {
    (FP32.name, "log"): (1.3, 1.5),
    (BF16.name, "log"): (1.4, 2.05),
    (FP32.name, "dynamic"): (0.6, 1.0),
}
# Over DeepSpeed's own bf16 states, which is what somebody with bf16 weights would run otherwise.
SPEED_OVER_BF16_STATES = {(BF16.name, "log"): (3.0, 1.0)}
FRACTION_OF_STREAM = {(FP32.name, "log"): (0.75, 0.95)}
# Speed of the default codec over others' fp32 steps.
SPEED_OVER = {"torch": 1.6, "torchao": 40, "bitsandbytes": 80}
LIST_OVER_FLAT = 1.15

# Two moments and a denominator of two blocks in float32, and the 64 pages that Linux may count
# late.
EXTRA_BYTES_PER_THREAD = 3 * 2 * 4 * MAX_BLOCK_SIZE
PAGES_UNCOUNTED = 64


def checks(result: dict) -> list[dict]:
    """Return, for every target whose rows were measured: value, limit, and whether it is met."""
    rows = result["rows"]
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


def _ours(rows: list[dict], variant: str) -> dict[str, dict]:
    """Return zero8's rows of a variant by codec."""
    return {r["codec"]: r for r in rows if (r["name"], r["variant"]) == ("zero8", variant)}


def _speed_over(rows: list[dict], row: dict, name: str, variant: str) -> float | None:
    """Return a row's speed over that of a peer, None if that was not measured."""
    peers = [r for r in rows if (r["name"], r["variant"]) == (name, variant)]
    return peers[0]["ns_per_param"] / row["ns_per_param"] if peers else None


def _checks_by_isa(
    rows: list[dict],
    what: str,
    limits: dict[tuple[str, str], tuple[float, float]],
    value_of: Callable[[dict], float | None],
) -> list[dict]:
    found = []
    for (variant, codec), (on_avx2, on_avx512) in limits.items():
        row = _ours(rows, variant).get(codec)
        value = value_of(row) if row else None
        if value is not None:
            is_wide = row["isa"].startswith("avx512")
            target = f"zero8 {variant} `{codec}`, {what}, {'AVX-512' if is_wide else 'AVX2'}"
            found.append(at_least(target, value, on_avx512 if is_wide else on_avx2))
    return found


def _peer_checks(rows: list[dict], default: str) -> list[dict]:
    ours = _ours(rows, FP32.name).get(default)
    found = []
    for name, limit in SPEED_OVER.items():
        value = _speed_over(rows, ours, name, FP32.name) if ours else None
        if value is not None:
            target = f"zero8 fp32 `{default}` (default), speed over {name}'s"
            found.append(at_least(target, value, limit))
    return found


def _memory_checks(result: dict) -> list[dict]:
    extra = [row["extra_bytes"] for row in result["rows"] if row["name"] == "zero8"]
    if None in extra:
        return []
    pages = PAGES_UNCOUNTED * result["machine"]["page_bytes"]
    limit = result["threads"] * (EXTRA_BYTES_PER_THREAD + pages)
    return [at_most("zero8, bytes of memory that a step takes and returns", max(extra), limit)]
