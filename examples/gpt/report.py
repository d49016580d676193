# SPDX-License-Identifier: Apache-2.0
"""Compare the two runs of launch/local.sh: a table, OUT/summary.json and OUT/loss.png."""

import argparse
import json
import platform
from pathlib import Path

from tabulate import tabulate

from examples.gpt.config import TWINS
from zero8.environment import extras

# The same of both runs.
SHARED = ("steps", "seed", "ranks", "config", "data", "parameters", "device")
# One row per column of the table: header, key, format.
COLUMNS = (
    ("optimizer", "optimizer", "{}"),
    ("weight bytes/param", "weight_bytes_per_param", "{:.3f}"),
    ("state bytes/param", "state_bytes_per_param", "{:.3f}"),
    ("state MiB", "state_mib", "{:.2f}"),
    ("host peak GiB", "host_peak_gib", "{:.2f}"),
    ("GPU peak GiB", "gpu_peak_gib", "{:.2f}"),
    ("train loss", "train_loss", "{:.4f}"),
    ("val loss", "val_loss", "{:.4f}"),
    ("iteration ms", "iteration_ms", "{:.1f}"),
)


def text(summary: dict) -> str:
    """Return the summary as people read it."""
    runs = [{**run, "state_mib": run["state_bytes"] / 2**20} for run in summary["runs"]]
    hidden = [] if summary["device"] == "cuda" else ["gpu_peak_gib"]
    if len({run.get("weight_bytes_per_param") for run in runs}) == 1:
        hidden += ["weight_bytes_per_param"]
    shown = [column for column in COLUMNS if column[1] not in hidden]
    cells = [[cell(run[key], form) for _, key, form in shown] for run in runs]
    headers = [header for header, *_ in shown]
    table = tabulate(cells, headers, "plain", disable_numparse=True, stralign="right")
    fp32, ours = runs
    gap = 100 * (ours["val_loss"] / fp32["val_loss"] - 1)
    return (
        f"{table}\nvalidation loss of {ours['optimizer']} against {fp32['optimizer']}: {gap:+.2f} %"
    )


def cell(value: object, form: str) -> str:
    """Return what a cell of the table says."""
    return "-" if value is None else form.format(value)


def plot(runs: list[dict], path: Path) -> None:
    """Draw both runs' train and validation losses over the steps."""
    from matplotlib.figure import Figure  # of zero8[train]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, color, dash in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        weights, train = f"{run['weights']} weights", run["train_curve"]
        name = ", ".join(filter(None, [run["optimizer"], run["codec"], weights]))
        axes.plot(range(1, len(train) + 1), train, color=color, alpha=0.3, label=f"{name}, train")
        style = {"color": color, "linestyle": dash, "marker": "o", "markersize": 4}
        name += f", validation ({run['val_loss']:.4f} at the end)"
        axes.plot(*zip(*run["val_curve"], strict=True), label=name, **style)
    millions = runs[0]["parameters"] / 1e6
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
    axes.set(title=f"Byte-level GPT, {millions:.2f} M parameters, {Path(runs[0]['config']).name}")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=100)


def report(out: Path, optimizer: str, command: str) -> dict:
    """Write OUT/summary.json and OUT/loss.png, print the table, and return the summary."""
    from benchmarks import record  # of zero8[train]

    runs = [json.loads((out / f"{n}.json").read_text()) for n in (TWINS[optimizer], optimizer)]
    rows = [{k: v for k, v in run.items() if not k.endswith("_curve")} for run in runs]
    place = {"platform": platform.platform(), "cpu": record.cpu()}
    summary = {**{key: runs[0][key] for key in SHARED}, "command": command}
    summary |= {"versions": record.versions() | place, "runs": rows}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(runs, out / "loss.png")
    print(text(summary))
    print(f"codec of {optimizer}: {runs[1]['codec']}")
    print(f"wrote {out / 'summary.json'} and {out / 'loss.png'}")
    return summary


def main() -> None:
    """Compare the runs in a folder."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.report", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of both runs")
    parser.add_argument("--optimizer", choices=TWINS, default="Adam8bitBlockwise")
    parser.add_argument("--command", default="", help="command that made the runs, for the record")
    arguments = parser.parse_args()
    with extras.explained(parser.prog):
        report(arguments.out, arguments.optimizer, arguments.command)


if __name__ == "__main__":
    main()
