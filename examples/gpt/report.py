# SPDX-License-Identifier: Apache-2.0
"""Compare the two runs of launch/local.sh: a table, OUT/summary.json and OUT/loss.png."""

import argparse
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from examples.gpt.engine import INT8, TWINS
from zero8 import extras

# True of both runs, or they are not comparable.
SHARED = ("engine", "steps", "seed", "ranks", "config", "data")
SHARED += ("parameters", "device")
# One row per column of a table: header, key, format.
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


def read_runs(out: Path, optimizer: str) -> list[dict]:
    """Return the results in `out` of the fp32 twin and of zero8's optimizer, in this order."""
    runs = []
    for name in (TWINS[optimizer], optimizer):
        if not (path := out / f"{name}.json").is_file():
            raise ValueError(f"found no {path}, expected a finished run; run launch/local.sh")
        runs.append(json.loads(path.read_text()))
    for key in SHARED:
        if runs[0][key] != runs[1][key]:
            raise ValueError(
                f"got runs with different {key}: {runs[0][key]!r} and {runs[1][key]!r}, expected "
                "the same; run launch/local.sh again"
            )
    return runs


def versions() -> dict:
    """Return the versions of the software and the names of platform and CPU."""
    import cpuinfo  # of zero8[train]

    packages = {one.name: one.version for one in metadata.distributions()}
    found = {name: packages.get(name) for name in ("zero8", "torch", "deepspeed", "torchao")}
    cpu = cpuinfo.get_cpu_info().get("brand_raw", platform.processor())
    return {
        **found,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu,
    }


def table(columns: Sequence[tuple], rows: list[dict]) -> str:
    """Return rows as aligned text."""
    lines = [[header for header, _, _ in columns]]
    for row in rows:
        row = {**row, "state_mib": row["state_bytes"] / 2**20}
        cells = ((row[key], form) for _, key, form in columns)
        lines.append(["-" if value is None else form.format(value) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def text(summary: dict) -> str:
    """Return the summary as people read it."""
    runs = summary["runs"]
    baseline, eight_bit = runs
    gap = eight_bit["val_loss"] / baseline["val_loss"] - 1
    hidden = [] if summary["device"] == "cuda" else ["gpu_peak_gib"]
    if len({run.get("weight_bytes_per_param") for run in runs}) == 1:
        hidden += ["weight_bytes_per_param"]
    return "\n".join(
        [
            table([c for c in COLUMNS if c[1] not in hidden], runs),
            f"validation loss of {eight_bit['optimizer']} against {baseline['optimizer']}: "
            f"{100 * gap:+.2f} %",
        ]
    )


def label(run: dict) -> str:
    """Return the name of a run in the figure: its optimizer, with the codec, and INT8 weights."""
    weights = "INT8 weights" if run["weights"] == INT8 else None
    remarks = ", ".join(filter(None, [run["codec"], weights]))
    return run["optimizer"] + (f" ({remarks})" if remarks else "")


def plot(runs: list[dict], path: Path) -> None:
    """Draw both runs' train and validation losses over the steps."""
    from matplotlib.figure import Figure  # of zero8[train]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, color, dash in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        name, train = label(run), run["train_curve"]
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
    """Write OUT/summary.json and OUT/loss.png, print the table, and return the summary.

    Args:
        out: the folder of both runs.
        optimizer: zero8's.
        command: what made the runs, for the record.
    """
    runs = read_runs(out, optimizer)
    rows = [{k: v for k, v in run.items() if not k.endswith("_curve")} for run in runs]
    summary = {**{key: runs[0][key] for key in SHARED}, "command": command}
    summary |= {"versions": versions(), "runs": rows}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(runs, out / "loss.png")
    print(text(summary))
    print(f"codec of {optimizer}: {runs[1]['codec']}")
    print(f"wrote {out / 'summary.json'} and {out / 'loss.png'}")
    return summary


def main() -> None:
    """Compare the runs in a folder."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.report", description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder of both runs")
    parser.add_argument("--optimizer", choices=TWINS, default="Adam8bitBlockwise")
    parser.add_argument("--command", default="", help="command that made the runs, for the record")
    arguments = parser.parse_args()
    with extras.explained(parser.prog):
        extras.need("cpuinfo", "matplotlib")
        report(arguments.out, arguments.optimizer, arguments.command)


if __name__ == "__main__":
    main()
