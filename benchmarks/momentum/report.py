# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.fidelity.runs import title_lines
from benchmarks.fidelity.schemes import FP32_CONTROL
from benchmarks.fidelity.tables import number
from benchmarks.record import table_lines


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    where = f"on {result['workers']} cores of {result['cpu']}"
    if "averages" not in result:
        head = title_lines(result, "Final losses with moments in 8 bits", where)
        return "\n".join([*head, *_loss_lines(result)]) + "\n"
    lines = [
        *title_lines(result, "Moments of SGD, Lion and AdEMAMix in 8 bits", where),
        "Errors are those of a small GPT's gradients, taken from one run with fp32 AdamW and fed "
        "to all optimizers alike; blocks of 256; the second half of the steps counts.",
    ]
    for section in (_average_lines, _sign_lines, _adam_lines, _loss_lines):
        lines += ["", *section(result)]
    return "\n".join(lines) + "\n"


def _average_lines(result: dict) -> list[str]:
    headers = ["beta", "states", "RMS error", "drift", "over `dynamic`"]
    cells = [
        [
            str(row["beta"]),
            row["states"],
            *(number(row[key]) for key in ("rms_error", "drift", "error_over_dynamic")),
            *(number(row[key]) for key in ("bound_of_run", "bound")),
        ]
        for row in result["averages"]
    ]
    return [
        "## A moving average",
        "",
        "The update of `SGD8bitBlockwise` without dampening, against float32 states: RMS(u_q - u) "
        "over RMS(u), and the same of the sums of updates (drift). Adam's first moment is rounded "
        "by (C2') with a beta of 0.9, by (C2\") with the others. Bound: Panter and Dite's for the "
        "best 256 levels of a Gaussian, sqrt(pi sqrt(3)/2)/256 of the standard deviation per "
        "rounding, added up over the memory of the average as if the errors of all steps were "
        "independent, in this run and in one without end. The errors of the dither are not: they "
        "cancel in part over steps.",
        "",
        *table_lines([*headers, "bound, this run", "bound, no end"], cells),
    ]


def _sign_lines(result: dict) -> list[str]:
    cells = [
        [
            _pair(row["betas"]),
            row["states"],
            _percent(row["wrong_share"]),
            _percent(row["wrong_share_by_size"]),
        ]
        for row in result["signs"]
    ]
    return [
        "## Lion",
        "",
        "Updates whose sign differs from that of the direction c in float32: their share, and "
        "their share where each counts \\|c\\|.",
        "",
        *table_lines(["betas", "states", "wrong signs", "weighted by \\|c\\|"], cells),
    ]


def _adam_lines(result: dict) -> list[str]:
    cells = [
        [
            _pair(row["betas"]),
            row["states"],
            *(number(row[key]) for key in ("rms_update_error", "drift")),
        ]
        for row in result["adam"]
    ]
    return [
        "## Adam",
        "",
        "The update against that of fp32 Adam, on the gradients of a run with the same betas. The "
        "first moment is rounded to nearest, in `log` by (C2') or, with a beta1 of 0.99, (C2\").",
        "",
        *table_lines(["betas", "states", "RMS error", "drift"], cells),
    ]


def loss_table(rows: list[dict]) -> list[str]:
    """Return the lines of a table of final losses."""
    headers = [
        "task",
        "optimizer",
        "states",
        "mean",
        "lowest",
        "highest",
        "minus fp32",
        "std",
        "error",
        "within",
    ]
    cells = [
        [
            row["task"],
            row["optimizer"],
            row["states"],
            *(f"{row[f'val_loss_{key}']:.4f}" for key in ("mean", "lowest", "highest")),
            f"{row['difference_mean']:+.4f}",
            f"{row['difference_std']:.4f}",
            f"{row['difference_standard_error']:.4f}",
            "yes" if row["mean_within_fp32s_range"] else "**no**",
        ]
        for row in rows
    ]
    return table_lines(headers, cells)


def loss_words(rows: list[dict]) -> str:
    """Return what a table of final losses needs said about its trainings and columns."""
    seeds = rows[0]["seeds"]
    return (
        f"Trainings to the end with {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}. "
        f"`{FP32_CONTROL}` has zero8's float32 states, so that runs of one seed differ by rounding "
        "alone. *minus fp32* and *std* are the mean and the standard deviation of their "
        "differences, *error* is the mean's standard error; *within*: whether the mean is between "
        "the lowest and the highest loss of float32."
    )


def setting_words(rows: list[dict]) -> str:
    """Return with what every optimizer was trained."""
    settings = [
        f"{row['task']}, {row['optimizer']}: {row['steps']} steps, peak lr {row['peak_lr']:g}, "
        f"weight decay {row['weight_decay']:g}"
        for row in rows
    ]
    return "; ".join(dict.fromkeys(settings)) + "."


def _loss_lines(result: dict) -> list[str]:
    rows = result["losses"]
    return [
        "## Validation losses",
        "",
        f"{loss_words(rows)} Lion has betas 0.9 and 0.99, SGD Nesterov's momentum of 0.9, AdEMAMix "
        "betas 0.9, 0.999 and 0.9999 and an alpha of 5, of which beta3 and alpha come up over all "
        f"steps. {setting_words(rows)}",
        "",
        *loss_table(rows),
    ]


def _pair(betas: list[float]) -> str:
    return f"{betas[0]:g}, {betas[1]:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
