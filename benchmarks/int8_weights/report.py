# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import section_lines
from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from benchmarks.record import table_lines


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    sections = (_distance_lines, _loss_lines)
    return "\n".join(section_lines(result, "INT8 weights", sections))


def _distance_lines(result: dict) -> list[str]:
    cells = [
        [
            f"{row['peak_lr']:g}",
            row["weights"],
            number(row["distance_over_way"]),
            f"{row['share_in_direction']:.3f}",
        ]
        for row in result["distances"]
    ]
    return [
        "## Distance to float32 weights",
        "",
        "The matrices of a small GPT, kept in every way, get the gradients of an fp32 run in "
        f"{result['distances'][0]['steps']} steps; moments are in the default codec. All begin at "
        "INT8 values with a scale per row. Distance: of all weights from the float32 ones at the "
        "end, over the way that these went. Along the way: the part of that way that the weights "
        "went, by projection. `torchao's` is the rounding of `copy_` into torchao's INT8 weights, "
        "by a global generator; `hash` independent thresholds, and `dither` the default, are "
        "functions of seed, step and element.",
        "",
        *table_lines(["peak lr", "weights", "distance / way", "along the way"], cells),
    ]


def _loss_lines(result: dict) -> list[str]:
    cells = [[row["weights"], *loss_cells(row)] for row in result["losses"]]
    return [
        "## Final losses",
        "",
        "Trainings with the weights of the linear layers kept in every way, embeddings and biases "
        "in float32; the model computes in float32 from exactly the values that are kept. "
        "Differences are to float32 weights of the same seed.",
        "",
        *table_lines(["weights", *LOSS_HEADERS], cells),
    ]
