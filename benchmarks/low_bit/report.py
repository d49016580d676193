# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import section_lines
from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from benchmarks.record import table_lines
from zero8.plan.report import GIB


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    sections = (_distance_lines, _memory_lines, _average_lines, _loss_lines)
    return "\n".join(section_lines(result, "Rounding in low-bit training", sections))


def _distance_lines(result: dict) -> list[str]:
    rows = result["distances"]
    cells = [
        [
            row["format"],
            f"1/{round(1 / row['update_codes'])}",
            row["rounding"],
            *(number(row[f"{key}_codes"]) for key in ("rms", "mean", "largest")),
        ]
        for row in rows
    ]
    headers = ["weights", "update / code", "rounding", "RMS distance", "mean distance"]
    return [
        "## Updates lost to rounding",
        "",
        f"4096 weights start at 1 and get the same update in each of {rows[0]['steps']} steps; "
        "bfloat16, or INT8 with a scale per row of 1/32. A code is the distance of two neighbours: "
        "1/128 and 1/32. Distances are from the right path, in codes: RMS and mean of all weights "
        "after the last step, and the largest of any weight after any step. Updates are exact, and "
        "both formats get the same thresholds, so that their numbers are the same. `dither` is "
        "zero8's, a function of seed, step and element.",
        "",
        *table_lines([*headers, "largest distance"], cells),
    ]


def _memory_lines(result: dict) -> list[str]:
    memory = result["memory"]
    parts = ("weight_bytes", "gradient_bytes", "state_bytes")
    cells = [
        [
            row["weights"],
            row["states"],
            *(f"{row[part] / GIB:.2f}" for part in parts),
            f"{sum(row[part] for part in parts) / GIB:.2f}",
            f"{row['state_bytes'] / memory['parameters']:.3f}",
            _computed(row),
        ]
        for row in memory["rows"]
    ]
    headers = ["weights", "states", "weights, GiB", "gradients, GiB", "states, GiB", "sum, GiB"]
    return [
        "## Memory",
        "",
        f"{memory['model']}, on one rank without offload: weights, gradients and the optimizer's "
        "states, without activations. Gradients have the dtype of the weights, and bfloat16 with "
        "INT8 weights. Bytes are those of `zero8 plan --parameters 8B --engine fsdp2 --offload "
        "none`, with `--dtype fp32` or `bf16-masters`, `--weights int8`, and `--codec`. The "
        "last column names what the plan does not know: bfloat16 states, computed as half of the "
        "plan's float32 states.",
        "",
        *table_lines([*headers, "bytes of states/param", "not from the plan"], cells),
    ]


def _computed(row: dict) -> str:
    return ", ".join(row["not_from_the_plan"]) or "-"


def _average_lines(result: dict) -> list[str]:
    rows = result["averages"]
    nearest = {row["format"]: row for row in rows if row["rounding"] == "nearest"}
    cells = [
        [
            row["format"],
            row["rounding"],
            number(row["rms_error"]),
            _ratio(row, nearest[row["format"]], "rms_error"),
            number(row["rms_error_of_sums"]),
            _ratio(row, nearest[row["format"]], "rms_error_of_sums"),
        ]
        for row in rows
    ]
    headers = ["gradients", "rounding", "RMS error", "over nearest", "RMS error of sums"]
    return [
        "## Averages of quantized gradients",
        "",
        "Four ranks send the gradients of the demonstration's GPT (width 128, two windows per "
        "rank) in linear codes, a scale per 256 elements; each is rounded once, and the decoded "
        "values are averaged. RMS error: of the average, over the RMS of the exact average, over "
        f"{rows[0]['steps']} steps. RMS error of sums: of the sum of all averages, over the RMS of "
        "the exact sum. `independent`: stochastic rounding by a generator. `dither`: thresholds of "
        "zero8, a function of seed, step, rank and element. `spread over ranks`: the same "
        "threshold for all ranks, shifted by rank/4 of its range. `subtracted`: the receiver "
        "computes the thresholds, too, and subtracts them. The thresholds of `dither` of two ranks "
        "differ by the same number at all elements until the next 32 steps, and its error of a "
        "step is by chance below or above that of `independent`.",
        "",
        *table_lines([*headers, "over nearest"], cells),
    ]


def _ratio(row: dict, nearest: dict, key: str) -> str:
    return f"{row[key] / nearest[key]:.2f}"


def _loss_lines(result: dict) -> list[str]:
    cells = [[row["format"], row["rounding"], *loss_cells(row)] for row in result["losses"]]
    headers = [header.replace("fp32", "exact") for header in LOSS_HEADERS]
    return [
        "## Final losses",
        "",
        "Trainings with Adam8bitBlockwise (`log`, beta2 0.999) on such averages, against runs of "
        "the same seeds with exact averages, `float32`. The second *std* is that of the "
        "differences.",
        "",
        *table_lines(["gradients", "rounding", *headers], cells),
    ]
