# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import section_lines
from benchmarks.fidelity.schemes import FP32_CONTROL
from benchmarks.fidelity.tables import number
from benchmarks.momentum.report import loss_table, loss_words, setting_words
from benchmarks.muon.errors import COMPARED_EVERY
from benchmarks.muon.orthogonal import COEFFICIENTS, ITERATIONS
from benchmarks.record import table_lines


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    sections = (_update_lines, _matrix_lines, _loss_lines)
    return "\n".join(section_lines(result, "The momentum of Muon in 8 bits", sections))


def _update_lines(result: dict) -> list[str]:
    keys = ("update_error", "orthogonalized_error", "angle_deg")
    cells = [
        [
            str(row["momentum"]),
            row["states"],
            *(number(row[f"{key}_{of}"]) for key in keys for of in ("mean", "worst")),
        ]
        for row in result["updates"]
    ]
    headers = ["RMS error of u", "worst", "orthogonalized", "worst", "angle, degrees", "worst"]
    return [
        "## Updates",
        "",
        "The gradients of the hidden matrices of a small GPT, taken from one run with fp32 AdamW. "
        "Muon's momentum m' = mu m + (1 - mu) g is rounded at every step, and Nesterov's update "
        "u = (1 - mu) g + mu m' is compared with that of float32 states: RMS(u_q - u) over RMS(u), "
        "the same after Newton-Schulz (5 iterations in float32), and the angle between both "
        f"orthogonalized matrices. Every {COMPARED_EVERY}th step of the second half is compared. "
        "Means are those of matrices, *worst* the worst matrix; angles are those of every matrix "
        "and step.",
        "",
        "`log` and `dynamic` are SGD's in blocks of 256, `log` rounded by the dither. The others "
        "round to the nearest level: `int8` is linear in blocks of 2048 (arXiv:2509.23106), `4bit` "
        "torchao's map of first moments (arXiv:2309.01507) and `4bit_linear` the integers up to 7, "
        "both in blocks of 128. Two rows of a momentum are yardsticks: `bf16`, a moment of 2 "
        "bytes, and the last, float32 momentum with Newton-Schulz in bfloat16, which Muon mostly "
        "has.",
        "",
        *table_lines(["momentum", "states", *headers], cells),
    ]


def _matrix_lines(result: dict) -> list[str]:
    rows = result["updates"]
    names = [matrix["name"] for matrix in rows[0]["matrices"]]
    errors = [
        [
            str(row["momentum"]),
            row["states"],
            *(number(matrix["orthogonalized_error"]) for matrix in row["matrices"]),
        ]
        for row in rows
    ]
    medians = [
        [
            str(row["momentum"]),
            *(number(matrix["fp32_median_singular_value"]) for matrix in row["matrices"]),
        ]
        for row in rows
        if row["states"] == FP32_CONTROL
    ]
    gain = COEFFICIENTS[0] ** ITERATIONS
    return [
        "## Matrices",
        "",
        "The errors of the orthogonalized update, matrix by matrix.",
        "",
        *table_lines(["momentum", "states", *names], errors),
        "",
        "The median singular value of the update in float32 over the norm of its matrix, a mean "
        "of the compared steps. If all were equal, it would be 1/sqrt(256) = 0.0625. Newton-Schulz "
        f"multiplies small ones by up to {COEFFICIENTS[0]}^{ITERATIONS} = {gain:.0f}, and with "
        "them the error of a code, which is spread over all directions.",
        "",
        *table_lines(["momentum", *names], medians),
    ]


def _loss_lines(result: dict) -> list[str]:
    rows = result["losses"]
    return [
        "## Validation losses",
        "",
        f"{loss_words(rows)} Each Muon, here with its momentum, is compared with that in float32, "
        "AdamW with the first. Muon has updates scaled by 0.2 sqrt(max(rows, columns)), decoupled "
        "weight decay and Newton-Schulz in float32; embeddings, biases and norms are AdamW's, of "
        f"betas 0.9 and 0.99, as is everything in the last row. {setting_words(rows)}",
        "",
        *loss_table(rows),
    ]
