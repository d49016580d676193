# SPDX-License-Identifier: Apache-2.0
"""What the steps are held to, and whether a result meets it.

Speeds are ratios of medians of one run, against DeepSpeedCPUAdam on the same fp32 tensors unless
another optimizer is named.  Limits depend on the instruction set that zero8 stepped with.
"""

from collections.abc import Callable

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
    found = _ratio_checks(
        rows, SPEED_OVER_FP32, "speed over DeepSpeed's fp32", _speed("deepspeed", FP32.name)
    )
    states = "speed over DeepSpeed's bf16 states"
    found += _ratio_checks(rows, SPEED_OVER_BF16_STATES, states, _speed("deepspeed", BF16.name))
    stream = "fraction of its own stream"
    found += _ratio_checks(
        rows, FRACTION_OF_STREAM, stream, lambda row, _: row["fraction_of_stream"]
    )
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


def _speed(name: str, variant: str) -> Callable[[dict, list[dict]], float | None]:
    """Return a function that gives a row's speed over a peer's, None if that was not measured."""

    def over(row: dict, rows: list[dict]) -> float | None:
        peers = [r for r in rows if (r["name"], r["variant"]) == (name, variant)]
        return peers[0]["ns_per_param"] / row["ns_per_param"] if peers else None

    return over


def _ratio_checks(
    rows: list[dict],
    limits: dict[tuple[str, str], tuple[float, float]],
    what: str,
    ratio: Callable[[dict, list[dict]], float | None],
) -> list[dict]:
    found = []
    for (variant, codec), (on_avx2, on_avx512) in limits.items():
        row = _ours(rows, variant).get(codec)
        value = ratio(row, rows) if row else None
        if value is not None:
            is_wide = row["isa"].startswith("avx512")
            target = f"zero8 {variant} `{codec}`, {what}, {'AVX-512' if is_wide else 'AVX2'}"
            found.append(at_least(target, value, on_avx512 if is_wide else on_avx2))
    return found


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
