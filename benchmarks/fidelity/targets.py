# SPDX-License-Identifier: Apache-2.0
"""What the default codec is held to, and whether a result meets it."""

import math

# RMS update error of the default over that of `dynamic`, per beta2.
LARGEST_ERROR_RATIO = {0.999: 0.25, 0.95: 0.60}
# RMS update error of `dynamic` over that of torchao, which implements the same maps.
PEER_TOLERANCE = 0.10
# Relative bias of the geometric mean of sqrt(v), on periodic gradients: a third of a cell.
LARGEST_BIAS = 0.01
# RMS update error of the dither over that of hashed thresholds, on periodic gradients.
LARGEST_RESONANCE = 1.25
# How far weights go after their gradient has ended, over how far fp32's go.
LARGEST_WAY = 1.25


def checks(result: dict) -> list[dict]:
    """Return, for every target whose rows were measured: value, limit, and whether it is met."""
    found = [check for beta2 in LARGEST_ERROR_RATIO for check in _checks_at(beta2, result)]
    found += _closed_loop_checks(result)
    if "bf16_weights" in result:
        found += _bf16_checks(result["bf16_weights"]["closed_loop"])
    if "robustness" in result:
        found += [c for b in LARGEST_ERROR_RATIO for c in _robustness_checks(b, result)]
    if "silence" in result:
        found += _silence_checks(result)
    if "resonance" in result:
        found += _resonance_checks(result["resonance"])
    return found


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


def _bf16_checks(closed_loop: list[dict]) -> list[dict]:
    rows = {row["weights"]: row for row in closed_loop}
    spread = rows["fp32"]["val_loss_std"]
    target = "bf16 weights, {}: mean loss above fp32's against fp32's std"
    found = [
        _check(target.format(name), rows[name]["difference_mean"], spread, least=-math.inf)
        for name in ("dither", "corrected")
    ]
    # Otherwise the closed loop could not have told good rounding from bad.
    loss = rows["nearest"]["difference_mean"]
    target = target.format("nearest (to be worse)")
    return [*found, {"target": target, "value": loss, "limit": spread, "met": loss > spread}]


def _robustness_checks(beta2: float, result: dict) -> list[dict]:
    rows = {
        (row["setting"], row["scheme"]): row
        for row in result["robustness"]
        if row["beta2"] == beta2
    }
    ours = {setting: row for (setting, name), row in rows.items() if name == result["default"]}
    ratios = {
        setting: row["rms_update_error"] / rows[setting, "dynamic"]["rms_update_error"]
        for setting, row in ours.items()
    }
    worst, at = max(ratios, key=ratios.get), f"all settings, beta2 {beta2}"
    largest = max(row["max_u_over_bound"] for row in ours.values())
    moved = sum(row["zero_grad_moved"] for row in ours.values())
    return [
        _check(f"RMS error over that of `dynamic`, {at}; worst: {worst}", ratios[worst], 1.0),
        _check(f"max |u| over its bound, {at}", largest, 1.0),
        _check(f"moved though g = 0, {at}", moved, 0),
    ]


def _silence_checks(result: dict) -> list[dict]:
    return [
        _check(
            f"way of weights whose gradient has ended over fp32's, beta2 {row['beta2']}",
            row["way_over_fp32"],
            LARGEST_WAY,
        )
        for row in result["silence"]
        if row["scheme"] == result["default"]
    ]


def _resonance_checks(rows: list[dict]) -> list[dict]:
    def place(row: dict) -> str:
        return f"worst: beta2 {row['beta2']}, period {row['period']}, {row['pattern']}"

    def bias(row: dict) -> float:
        return abs(row["dithered"]["sqrt_v_bias"] - 1)

    biased, resonant = max(rows, key=bias), max(rows, key=lambda row: row["ratio"])
    target = "periodic gradients, |bias of sqrt(v)|"
    ratio_target = "periodic gradients, RMS error over that of hashed thresholds"
    return [
        _check(f"{target}; {place(biased)}", bias(biased), LARGEST_BIAS),
        _check(f"{ratio_target}; {place(resonant)}", resonant["ratio"], LARGEST_RESONANCE),
    ]
