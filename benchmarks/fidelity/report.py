# SPDX-License-Identifier: Apache-2.0
"""The fidelity result as markdown tables."""

from benchmarks.fidelity.runs import title_lines
from benchmarks.fidelity.sections import (
    bf16_lines,
    resonance_lines,
    robustness_lines,
    silence_lines,
)
from benchmarks.fidelity.tables import LOSS_HEADERS, loss_cells, number
from benchmarks.record import check_lines, table_lines

COLUMNS = (
    ("scheme", lambda row: f"{row['scheme']} ({row['implementation']})"),
    ("block", lambda row: str(row["block_size"] or "-")),
    ("bytes/param", lambda row: f"{row['bytes_per_param']:.3f}"),
    ("RMS error", lambda row: number(row["rms_update_error"])),
    ("99.9 % error", lambda row: number(row["p999_update_error"])),
    ("max \\|u\\|", lambda row: f"{row['max_abs_u']:.4g}"),
    ("its bound", lambda row: f"{row['max_abs_u_bound']:.4g}"),
    ("drift", lambda row: number(row["drift"])),
    ("bias of sqrt(v)", lambda row: f"{row['sqrt_v_bias']:.4f}"),
    ("v lost", lambda row: f"{100 * row['v_zero_share']:.3g} %"),
    ("moved at g = 0", lambda row: f"{row['zero_grad_moved']} of {row['zero_grad_count']}"),
)


SECTIONS = {
    "bf16_weights": bf16_lines,
    "robustness": robustness_lines,
    "silence": silence_lines,
    "resonance": resonance_lines,
}


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    where = f"on {result['workers']} cores of {result['cpu']}; default codec `{result['default']}`"
    lines = [
        *title_lines(result, "Fidelity of the optimizer states", where),
        "Errors are of u = mhat/(sqrt(vhat) + eps) against fp32 Adam on the same gradients, second "
        "half of the run, in units of RMS(u). zero8 clips |u| at its bound.",
    ]
    for beta2 in betas_of(result):
        rows = rows_at(result, beta2)
        cells = [[cell(row) for _, cell in COLUMNS] for row in rows]
        lines += ["", f"## beta2 = {beta2}", "", *table_lines([h for h, _ in COLUMNS], cells)]
        notes = [(row["scheme"], row["block_size"], row["note"]) for row in rows if row["note"]]
        lines += ["", *(f"- {name}, {size or 'no'} blocks: {note}" for name, size, note in notes)]
    lines += ["", "## Closed loop", "", *_closed_loop_lines(result["closed_loop"])]
    for key, section in SECTIONS.items():
        if key in result:
            lines += ["", *section(result[key])]
    lines += ["", "## Targets", "", *check_lines(result["checks"])]
    if result["skipped"]:
        lines += ["", "## Skipped", ""]
        lines += [f"- {skipped_label(entry)}: {entry['reason']}" for entry in result["skipped"]]
    return "\n".join(lines) + "\n"


def betas_of(result: dict) -> list[float]:
    """Return the values of beta2 that were measured, largest first."""
    return sorted({row["beta2"] for row in result["rows"]}, reverse=True)


def rows_at(result: dict, beta2: float) -> list[dict]:
    """Return the rows of one beta2."""
    return [row for row in result["rows"] if row["beta2"] == beta2]


def skipped_label(entry: dict) -> str:
    """Return which scheme was skipped, and where."""
    setting = f", {entry['setting']}" if "setting" in entry else ""
    return f"{entry['scheme']}, beta2 = {entry['beta2']}{setting}"


def _closed_loop_lines(rows: list[dict]) -> list[str]:
    return table_lines(
        ["scheme", "beta2", *LOSS_HEADERS],
        [[row["scheme"], str(row["beta2"]), *loss_cells(row)] for row in rows],
    )
