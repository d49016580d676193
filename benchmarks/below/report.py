# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import section_lines
from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from zero8.bench.record import table_lines

_UPDATE_HEADERS = [
    *("beta2", "code", "block", "bytes/param", "RMS error", "99.9 % error", "drift"),
    *("bias of sqrt(v)", "max \\|u\\| / bound", "moved at g = 0"),
]


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    sections = (_update_lines, _spread_lines, _loss_lines)
    return "\n".join(section_lines(result, "States below two bytes per parameter", sections))


def _update_lines(result: dict) -> list[str]:
    cells = [
        [
            str(row["beta2"]),
            row["scheme"],
            str(row["block_size"]),
            f"{row['bytes_per_param']:.3f}",
            *(number(row[key]) for key in ("rms_update_error", "p999_update_error", "drift")),
            f"{row['sqrt_v_bias']:.4f}",
            number(row["max_u_over_bound"]),
            f"{row['zero_grad_moved']} of {row['zero_grad_count']}",
        ]
        for row in result["updates"]
    ]
    return [
        "## Updates with codes of 12 bits",
        "",
        "Errors are of u = mhat/(sqrt(vhat) + eps) against fp32 Adam on the same gradients of the "
        f"small GPT, second half of {result['updates'][0]['steps']} steps, in units of RMS(u); |u| "
        "is not clipped. `4bit` is of 8 bits, from arXiv:2309.01507 without its rank-1 scales.",
        "",
        *table_lines(_UPDATE_HEADERS, cells),
    ]


def _spread_lines(result: dict) -> list[str]:
    cells = [
        [
            row["matrix"],
            " x ".join(map(str, row["shape"])),
            *(f"{row[key]:.2f}" for key in ("row", "column", "tile")),
        ]
        for row in result["spreads"]
    ]
    headers = ["matrix", "shape", "64 of a row", "64 of a column", "64 x 64, less rank 1"]
    return [
        "## How unlike the v of a matrix are",
        "",
        "Standard deviation of log2(sqrt(v)), in octaves, at the end of a run of fp32 AdamW at "
        "beta2 0.999: among neighbours that would share one v, and in tiles what a factor per row "
        "and one per column leave.",
        "",
        *table_lines(headers, cells),
    ]


def _loss_lines(result: dict) -> list[str]:
    cells = [
        [
            row["model"],
            row["scheme"],
            f"{row['bytes_per_param']:.3f}",
            *loss_cells(row),
        ]
        for row in result["losses"]
    ]
    return [
        "## Final losses",
        "",
        f"Trainings to the end at beta2 {result['losses'][0]['beta2']}; fp32 is torch's AdamW. "
        "Where v is shared, m is float32 and is counted as `log`'s 8-bit code; sharing counts "
        "float32 means or factors, `in bytes` a float per row and a code per column of a tile. "
        "Bytes are of the matrices that 8-bit states quantize.",
        "",
        *table_lines(["model", "states", "bytes/param", *LOSS_HEADERS], cells),
    ]
