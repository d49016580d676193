# SPDX-License-Identifier: Apache-2.0
"""What the default codec is held to, and whether a result meets it."""

import math

# Of the default's RMS update error over that of `dynamic`, per beta2.
LARGEST_ERROR_RATIO = {0.999: 0.25, 0.95: 0.60}
# Of the RMS update error of `dynamic` over that of torchao, which implements the same maps.
PEER_TOLERANCE = 0.10


def checks(result: dict) -> list[dict]:
    """Return, for every target whose rows were measured: value, limit, and whether it is met."""
    found = [check for beta2 in LARGEST_ERROR_RATIO for check in _checks_at(beta2, result)]
    return found + _closed_loop_checks(result)


def _check(target: str, value: float, limit: float, least: float = 0.0) -> dict:
    return {"target": target, "value": value, "limit": limit, "met": least <= value <= limit}


def _checks_at(beta2: float, result: dict) -> list[dict]:
    rows = {
        row["scheme"]: row
        for row in result["rows"]
        if row["beta2"] == beta2 and row["block_size"] in (256, None)
    }
    errors = {name: row["rms_update_error"] for name, row in rows.items()}
    ours, at = result["default"], f"beta2 {beta2}"
    found = [
        _check(f"max |u| over its bound, {at}", rows[ours]["max_u_over_bound"], 1.0),
        _check(f"moved though g = 0, {at}", rows[ours]["zero_grad_moved"], 0),
        _check(
            f"RMS error over that of `dynamic`, {at}",
            errors[ours] / errors["dynamic"],
            LARGEST_ERROR_RATIO[beta2],
        ),
    ]
    if "torchao" in errors:
        ratio, spread = errors["dynamic"] / errors["torchao"], PEER_TOLERANCE
        target = f"RMS error of `dynamic` over torchao's, {at}"
        found.append(_check(target, ratio, 1 + spread, 1 - spread))
    # At smaller beta2 bfloat16 moments follow every step, and no 8-bit code comes near.
    if "deepspeed_bf16" in errors and beta2 == 0.999:
        ratio = errors[ours] / errors["deepspeed_bf16"]
        found.append(_check(f"RMS error over that of DeepSpeed's bf16 states, {at}", ratio, 1.0))
    return found


def _closed_loop_checks(result: dict) -> list[dict]:
    rows = {(row["scheme"], row["beta2"]): row for row in result["closed_loop"]}
    return [
        _check(
            f"closed loop, mean loss above fp32's against fp32's std, beta2 {beta2}",
            row["difference_mean"],
            rows["fp32", beta2]["val_loss_std"],
            least=-math.inf,
        )
        for (scheme, beta2), row in rows.items()
        if scheme == result["default"]
    ]
