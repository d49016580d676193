# SPDX-License-Identifier: Apache-2.0
"""Measure what states and weights of few bits cost: errors of updates, and final losses.

Writes OUT (JSON) and a table (.md) beside it, and with the settings of rivals a figure (.png).  A
setting is an algorithm on a task.  In each, the gradients of one fp32 run go to all schemes, and
some schemes are trained to the end.
"""

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks import record
from benchmarks.fidelity.figure import draw
from benchmarks.fidelity.losses import final_loss, loss_statistics
from benchmarks.fidelity.replay import STALL_STEPS, replay
from benchmarks.fidelity.schemes import usable
from benchmarks.fidelity.table import QUICK, SETTINGS
from benchmarks.fidelity.training import Setting
from benchmarks.pool import run_all

MODULE = "benchmarks.fidelity"
WORDS = (
    "Errors are of the update u against that of the same algorithm with float32 states on the same "
    "gradients: RMS(u_q - u) over RMS(u) in the second half of a run, and the same of the sums of "
    "updates (drift). Adam's u is mhat/(sqrt(vhat) + eps). Lion's is a sign, so that its RMS error "
    "is twice the root of the share of wrong signs. `gradients that end` compares elements without "
    "a gradient; `kept weights` compares what weights lose in a step, with its learning rate. "
    "sqrt(v) over fp32's is a geometric mean at the end, and its error the RMS of relative errors. "
    "Stalled are elements whose code of v has not changed once in the last "
    f"{STALL_STEPS} steps, of those whose exact v has moved by more than "
    "1 % from the first to the last of these steps. "
    "Losses are means over seeds; differences are those of runs of one seed, with the standard "
    "error of their mean."
)
COLUMNS = {
    "bytes/param": "bytes_per_param",
    "RMS error": "rms_update_error",
    "drift": "drift",
    "largest \\|u\\|": "largest_update",
    "moved at g = 0": "zero_grad_moved",
    "sqrt(v) over fp32's": "sqrt_v_bias",
    "error of sqrt(v)": "sqrt_v_error",
    "stalled": "stalled",
    "loss": "val_loss_mean",
    "minus fp32's": "difference_mean",
    "error of that": "difference_standard_error",
}


def measure(settings: Sequence[Setting]) -> dict:
    """Run all replays and trainings; return the rows, and what was skipped."""
    settings, missing = zip(*map(usable, settings), strict=True)
    replays = [partial(replay, setting) for setting in settings]
    cases = [(s, scheme, seed) for s in settings for scheme in s.trained for seed in s.seeds]
    results = run_all([*replays, *(partial(final_loss, *case) for case in cases)], record.cores())
    replayed, trained = results[: len(replays)], results[len(replays) :]
    rows = {(row["setting"], row["scheme"]): row for found in replayed for row in found}
    losses: dict[tuple[str, str], list[float]] = {}
    for (setting, scheme, _), loss in zip(cases, trained, strict=True):
        losses.setdefault((setting.name, scheme), []).append(loss)
    for setting in settings:
        for scheme in setting.trained:
            key, fp32 = (setting.name, scheme), losses[setting.name, setting.trained[0]]
            row = rows.setdefault(key, {"setting": setting.name, "scheme": scheme})
            row |= loss_statistics(losses[key], fp32)
    return {"rows": list(rows.values()), "skipped": [one for of_all in missing for one in of_all]}


def markdown(result: dict) -> list[str]:
    """Return the lines of the table of a result."""
    names = {name: (name, record.TEXT) for name in ("setting", "scheme")}
    numbers = {header: (key, record.NUMBER) for header, key in COLUMNS.items()}
    skipped = [f"- skipped {e['setting']}, {e['scheme']}: {e['reason']}" for e in result["skipped"]]
    rows = record.table_of(result["rows"], names | numbers)
    return [WORDS, "", *rows, *([""] if skipped else []), *skipped]


def main() -> None:
    """Measure and write both files."""
    parser = record.parser(MODULE, __doc__)
    parser.add_argument("--quick", action="store_true", help="Adam on text only, fewer schemes")
    parser.add_argument("--only", default="", metavar="WORDS", help="settings with these words")
    arguments = parser.parse_args()
    settings = [s for s in (QUICK if arguments.quick else SETTINGS) if arguments.only in s.name]
    if not settings:
        parser.error(f"got --only {arguments.only}, expected words of {[s.name for s in SETTINGS]}")
    environment = record.environment(MODULE)
    result = {**environment, **measure(settings)}
    record.write(result, arguments.json, markdown, "Fidelity of states and weights of few bits")
    draw(result["rows"], arguments.json.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
