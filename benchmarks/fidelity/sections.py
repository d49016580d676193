# SPDX-License-Identifier: Apache-2.0
"""The sections of the report that only the full measurement has."""

from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from benchmarks.record import table_lines


def bf16_lines(result: dict) -> list[str]:
    """Return the section on bfloat16 weights."""
    metrics = ("median_ulps", "rms_ulps", "p999_ulps", "max_ulps", "share_of_way")
    headers = ["weights", "median", "RMS", "99.9 %", "largest", "share of the way"]
    replay = [[row["weights"], *(number(row[m]) for m in metrics)] for row in result["replay"]]
    losses = [[row["weights"], *loss_cells(row)] for row in result["closed_loop"]]
    return [
        "## bfloat16 weights without float32 masters, beta2 = 0.999",
        "",
        "Distance to float32 weights that took the same updates, at the end of the run: per "
        "weight in bfloat16 ulps of the larger of the two, and of all weights as a share of the "
        "way that the float32 weights went. Moments are in the default codec.",
        "",
        *table_lines(headers, replay),
        "",
        "Closed loop: the model computes in float32 from exactly the bfloat16 weights, and its "
        "gradients are rounded to bfloat16; fp32 is torch's AdamW on float32 weights.",
        "",
        *table_lines(["weights", *LOSS_HEADERS], losses),
    ]


def robustness_lines(rows: list[dict]) -> list[str]:
    """Return the section on other settings."""
    headers = [
        *("setting", "beta2", "scheme", "RMS error", "99.9 % error", "max \\|u\\| / bound"),
        *("drift", "bias of sqrt(v)", "v lost", "moved at g = 0"),
    ]
    cells = [
        [
            row["setting"],
            str(row["beta2"]),
            row["scheme"],
            number(row["rms_update_error"]),
            number(row["p999_update_error"]),
            number(row["max_u_over_bound"]),
            number(row["drift"]),
            f"{row['sqrt_v_bias']:.4f}",
            f"{100 * row['v_zero_share']:.3g} %",
            f"{row['zero_grad_moved']} of {row['zero_grad_count']}",
        ]
        for row in rows
    ]
    return [
        "## Other settings",
        "",
        "As above, with half the steps. `embedding`: 4096 tokens by Zipf's law, rare rows get a "
        "gradient in few steps; `convolutions`: four layers on small noisy images; `LoRA`: "
        "adapters of rank 16 on the linear layers of a frozen GPT.",
        "",
        *table_lines(headers, cells),
    ]


def silence_lines(rows: list[dict]) -> list[str]:
    """Return the section on gradients that end."""
    headers = ["scheme", "beta2", "silent steps", "way / lr", "over fp32's", "last \\|u\\|"]
    cells = [
        [
            row["scheme"],
            str(row["beta2"]),
            str(row["silent_steps"]),
            *(number(row[key]) for key in ("way", "way_over_fp32", "last_abs_u")),
        ]
        for row in rows
    ]
    return [
        "## Gradients that end",
        "",
        "Half of the elements of every block have no gradient any more: how far their weights go "
        "from then on, mean over elements. In fp32 they come to rest.",
        "",
        *table_lines(headers, cells),
    ]


def resonance_lines(rows: list[dict]) -> list[str]:
    """Return the section on periodic gradients: for every beta2 and period the worse pattern."""
    worst: dict[tuple, dict] = {}
    for row in rows:
        key = row["beta2"], row["period"]
        worst[key] = max(worst.get(key, row), row, key=lambda row: row["ratio"])
    headers = [
        *("beta2", "period", "pattern", "steps", "RMS error", "hashed", "ratio"),
        *("worst ratio (row length)", "drift", "hashed", "bias of sqrt(v)", "hashed"),
    ]
    return [
        "## Periodic gradients",
        "",
        "Whether the dither of v, whose steps are the golden ratio's, resonates with gradients of "
        "a fixed period: errors of u with the dither, and with hashed independent thresholds in "
        "its place. m is exact, so errors are those of v's rounding alone. Small parameters with "
        "rows of 64 to 1000; of each period the pattern with the larger ratio.",
        "",
        *table_lines(headers, [_resonance_cells(row) for row in worst.values()]),
    ]


def _resonance_cells(row: dict) -> list[str]:
    dithered, hashed = row["dithered"], row["hashed"]
    return [
        str(row["beta2"]),
        str(row["period"]),
        row["pattern"],
        str(row["steps"]),
        number(dithered["rms_update_error"]),
        number(hashed["rms_update_error"]),
        f"{row['ratio']:.2f}",
        f"{row['worst_width_ratio']:.2f} ({row['worst_width']})",
        number(dithered["drift"]),
        number(hashed["drift"]),
        f"{dithered['sqrt_v_bias']:.4f}",
        f"{hashed['sqrt_v_bias']:.4f}",
    ]
