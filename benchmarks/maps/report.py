# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import title_lines
from benchmarks.fidelity.tables import number
from benchmarks.record import table_lines


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    where = f"{result['workers']} worker(s) on {result['cpu']}"
    lines = [
        *title_lines(result, "Maps of 8-bit states", where),
        "Errors are of Adam's update u = mhat/(sqrt(vhat) + eps), on gradients of the "
        "demonstration's GPT, beta1 0.9, beta2 0.999. RMS errors are in units of RMS(u). "
        "Blocks have 256 elements; `tensor`: one scale for each tensor.",
    ]
    sections = (_once_lines, _carried_lines, _sensitivity_lines)
    return "\n".join([*lines, *(line for section in sections for line in section(result))]) + "\n"


def _once_lines(result: dict) -> list[str]:
    headers = ["map", "scale per", "mean \\|error\\|", "mean relative error", "RMS error"]
    headers += ["relative error above 10 %", "pairs of codes used"]
    cells = [
        [
            row["map"],
            row["grain"],
            *(number(row[f"{kind}_error"]) for kind in ("mean_absolute", "mean_relative")),
            number(row["rms_update_error"]),
            f"{100 * row['large_relative_share']:.3g} %",
            f"{row['pairs_used']} of 65536",
        ]
        for row in result["once"]
    ]
    return [
        "",
        "## One quantization",
        "",
        "Exact moments of an fp32 run, encoded and decoded: means over "
        f"{result['once'][0]['elements']} elements.",
        "",
        *table_lines(headers, cells),
    ]


def _carried_lines(result: dict) -> list[str]:
    headers = ["map", "scale per", "bytes/param", "RMS error", "99.9 % error", "max \\|u\\|"]
    headers += ["drift", "bias of sqrt(v)", "v lost"]
    cells = [
        [
            row["map"],
            row["grain"],
            f"{row['bytes_per_param']:.3f}",
            *(number(row[key]) for key in ("rms_update_error", "p999_update_error", "max_abs_u")),
            number(row["drift"]),
            f"{row['sqrt_v_bias']:.4f}",
            f"{100 * row['v_zero_share']:.3g} %",
        ]
        for row in result["carried"]
    ]
    return [
        "",
        "## States kept in 8 bits",
        "",
        "The same gradients, each state kept in its codes for the whole run; errors are those of "
        "the second half.",
        "",
        *table_lines(headers, cells),
    ]


def _sensitivity_lines(result: dict) -> list[str]:
    rows = result["sensitivity"]
    schemes = list(rows[0]["val_losses"])
    cells = [
        [row["hyperparameter"], _value(row), str(seed)]
        + [f"{row['val_losses'][scheme][place]:.4f}" for scheme in schemes]
        for row in rows
        for place, seed in enumerate(row["seeds"])
    ]
    defaults = ", ".join(f"{name} {value:g}" for name, value in result["defaults"].items())
    return [
        "",
        "## Final losses by hyperparameter",
        "",
        f"Validation loss, nats per byte, after {result['steps']} steps. Defaults: {defaults}.",
        "",
        *table_lines(["hyperparameter", "value", "seed", *schemes], cells),
    ]


def _value(row: dict) -> str:
    return "-" if row["value"] is None else f"{row['value']:g}"
