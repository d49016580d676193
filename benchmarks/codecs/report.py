# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.report import skipped_label
from benchmarks.fidelity.runs import section_lines
from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from benchmarks.record import table_lines

_UPDATE_HEADERS = [
    *("setting", "beta2", "codec", "bytes/param", "RMS error", "99.9 % error", "drift"),
    *("bias of sqrt(v)", "max \\|u\\| / bound", "v lost", "moved at g = 0"),
]


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    sections = (_update_lines, _silence_lines, _loss_lines)
    lines = section_lines(result, "The codecs of Adam's states", sections)
    lines += [f"- skipped {skipped_label(entry)}: {entry['reason']}" for entry in result["skipped"]]
    return "\n".join(lines)


def _update_lines(result: dict) -> list[str]:
    cells = [
        [
            row["setting"],
            str(row["beta2"]),
            row["scheme"],
            f"{row['bytes_per_param']:.3f}",
            *(number(row[key]) for key in ("rms_update_error", "p999_update_error", "drift")),
            f"{row['sqrt_v_bias']:.4f}",
            number(row["max_u_over_bound"]),
            f"{100 * row['v_zero_share']:.3g} %",
            f"{row['zero_grad_moved']} of {row['zero_grad_count']}",
        ]
        for row in result["updates"]
    ]
    steps = result["updates"][0]["steps"]
    return [
        "## Updates",
        "",
        "Errors are of u = mhat/(sqrt(vhat) + eps) against fp32 Adam on the same gradients, second "
        f"half of {steps} steps, in units of RMS(u). zero8 clips |u| at its bound. `GPT` is the "
        "demonstration's model in small; `lr x 10` the same with ten times the learning rate; "
        "`embedding` has 4096 tokens by Zipf's law, of which rare ones get a gradient in few "
        "steps. `deepspeed_bf16` is DeepSpeedCPUAdam with bfloat16 moments.",
        "",
        *table_lines(_UPDATE_HEADERS, cells),
    ]


def _silence_lines(result: dict) -> list[str]:
    cells = [
        [
            row["scheme"],
            str(row["beta2"]),
            *(number(row[key]) for key in ("way", "way_over_fp32", "last_abs_u")),
        ]
        for row in result["silence"]
    ]
    return [
        "## Gradients that end",
        "",
        "Half of the elements of every block have no gradient any more: how far their weights go "
        f"in the {result['silence'][0]['silent_steps']} steps from then on, mean over elements, in "
        "units of lr.",
        "",
        *table_lines(["codec", "beta2", "way / lr", "over fp32's", "last \\|u\\|"], cells),
    ]


def _loss_lines(result: dict) -> list[str]:
    cells = [[row["scheme"], str(row["beta2"]), *loss_cells(row)] for row in result["losses"]]
    return [
        "## Final losses",
        "",
        "Trainings of the small GPT to the end; fp32 is torch's AdamW.",
        "",
        *table_lines(["codec", "beta2", *LOSS_HEADERS], cells),
    ]
