# SPDX-License-Identifier: Apache-2.0
"""What the steps are held to, and whether a result meets it.

Speeds are ratios of medians of one run, against DeepSpeedCPUAdam on the same fp32 tensors unless
another optimizer is named.
"""

from zero8.bench.step.variants import BF16, FP32
from zero8.spec.grid import MAX_BLOCK_SIZE

SPEED_OF_FASTEST = {FP32.name: 1.15, BF16.name: 1.4}
SPEED_OF_DEFAULT = {FP32.name: 1.0, BF16.name: 1.2}
SPEED_OF_DYNAMIC = 0.75
# Speed of the default codec over others' fp32 steps.
SPEED_OVER = {"torch": 1.6, "torchao": 40, "bitsandbytes": 80}
FRACTION_OF_STREAM = 0.90
AVX2_NS_IN_CACHE = 0.60
LIST_OVER_FLAT = 1.15

# Two moments of two blocks in float32, and the 64 pages that Linux may count late.
EXTRA_BYTES_PER_THREAD = 4 * 4 * MAX_BLOCK_SIZE
PAGES_UNCOUNTED = 64


def checks(result: dict) -> list[dict]:
    """Return, for every target whose rows were measured: value, limit, and whether it is met."""
    found = _speed_checks(result["rows"], result["default"])
    found += _peer_checks(result["rows"], result["default"])
    fastest = _fastest(result["rows"], FP32.name)
    stream = f"zero8 fp32 `{fastest['codec']}` (fastest), fraction of its own stream"
    found.append(at_least(stream, fastest["fraction_of_stream"], FRACTION_OF_STREAM))
    cached = [
        row for row in result["in_cache"] if (row["variant"], row["isa"]) == (FP32.name, "avx2")
    ]
    if cached:
        ns = min(row["ns_per_param"] for row in cached)
        found.append(at_most("fastest fp32 on AVX2 in the cache, ns", ns, AVX2_NS_IN_CACHE))
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


def _fastest(rows: list[dict], variant: str) -> dict:
    return min(_ours(rows, variant).values(), key=lambda row: row["ns_per_param"])


def _speed_checks(rows: list[dict], default: str) -> list[dict]:
    cases = [(_fastest(rows, v), "fastest", limit) for v, limit in SPEED_OF_FASTEST.items()]
    cases += [(_ours(rows, v).get(default), "default", at) for v, at in SPEED_OF_DEFAULT.items()]
    cases.append((_ours(rows, FP32.name).get("dynamic"), "the paper's maps", SPEED_OF_DYNAMIC))
    return [
        at_least(
            f"zero8 {row['variant']} `{row['codec']}` ({which}), speed over DeepSpeed's fp32",
            row["ratio_vs_deepspeed_fp32"],
            limit,
        )
        for row, which, limit in cases
        if row and row["ratio_vs_deepspeed_fp32"]
    ]


def _peer_checks(rows: list[dict], default: str) -> list[dict]:
    ours = _ours(rows, FP32.name).get(default)
    peers = {row["name"]: row for row in rows if row["variant"] == FP32.name}
    return [
        at_least(
            f"zero8 fp32 `{default}` (default), speed over {name}'s",
            peers[name]["ns_per_param"] / ours["ns_per_param"],
            limit,
        )
        for name, limit in SPEED_OVER.items()
        if ours and name in peers
    ]


def _memory_checks(result: dict) -> list[dict]:
    extra = [row["extra_bytes"] for row in result["rows"] if row["name"] == "zero8"]
    if None in extra:
        return []
    pages = PAGES_UNCOUNTED * result["machine"]["page_bytes"]
    limit = result["threads"] * (EXTRA_BYTES_PER_THREAD + pages)
    return [at_most("zero8, bytes of memory that a step takes and returns", max(extra), limit)]
