# SPDX-License-Identifier: Apache-2.0
"""Compare the two runs of launch/local.sh: tables, OUT/summary.json and OUT/loss.png."""

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record
from examples.gpt import at_scale
from examples.gpt.engine import INT8, TWINS
from zero8 import extras

CURVES = ("train_curve", "val_curve")
# True of both runs, or they are not comparable.
SHARED = (
    "engine",
    "steps",
    "seed",
    "ranks",
    "config",
    "data",
    "unigram_entropy",
    "parameters",
    "device",
)
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
    ("optimizer step ms", "step_ms", "{:.2f}"),
    ("iteration ms", "iteration_ms", "{:.1f}"),
)
AT_SCALE_COLUMNS = (
    ("optimizer", "optimizer", "{}"),
    ("state MiB", "state_mib", "{:.1f}"),
    ("parameters, gradients and states GiB", "host_gib", "{:.3f}"),
    ("optimizer step ms", "step_ms", "{:.1f}"),
)


def read_runs(out: Path, optimizer: str) -> list[dict]:
    """Return the results in `out` of the fp32 twin and of zero8's optimizer, in this order."""
    runs = []
    for name in (TWINS[optimizer], optimizer):
        path = out / f"{name}.json"
        if not path.is_file():
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
    return record.versions() | {"platform": platform.platform(), "cpu": record.cpu()}


def summarize(runs: list[dict], scale: dict, command: str) -> dict:
    """Return the content of summary.json: what the runs share, one row each, steps at scale."""
    shared = {key: runs[0][key] for key in SHARED}
    rows = [{k: v for k, v in run.items() if k not in CURVES} for run in runs]
    return {**shared, "command": command, "versions": versions(), "runs": rows, "at_scale": scale}


def table(columns: Sequence[tuple], rows: list[dict]) -> str:
    """Return rows as aligned text."""
    lines = [[header for header, _, _ in columns]]
    for row in rows:
        cells = ((row[key], form) for _, key, form in columns)
        lines.append(["-" if value is None else form.format(value) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def text(summary: dict) -> str:
    """Return the summary as people read it."""
    baseline, eight_bit = summary["runs"]
    runs = [run | {"state_mib": run["state_bytes"] / 2**20} for run in summary["runs"]]
    gap = eight_bit["val_loss"] / baseline["val_loss"] - 1
    scale, on_gpu = summary["at_scale"], summary["device"] == "cuda"
    rows = [
        row | {"state_mib": row["state_bytes"] / 2**20, "host_gib": row["host_bytes"] / 2**30}
        for row in scale["rows"]
    ]
    hidden = {"gpu_peak_gib": not on_gpu}
    # Shown where the runs differ in it; results from before INT8 weights lack it.
    hidden["weight_bytes_per_param"] = len({run.get("weight_bytes_per_param") for run in runs}) == 1
    return "\n".join(
        [
            table([c for c in COLUMNS if not hidden.get(c[1])], runs),
            f"unigram entropy of the validation text: {summary['unigram_entropy']:.4f} nats/byte",
            f"validation loss of {eight_bit['optimizer']} against {baseline['optimizer']}: "
            f"{100 * gap:+.2f} %",
            "",
            f"{scale['numel']:,} float32 parameters, stepped on the CPU by one process with "
            f"{scale['threads']} threads:",
            table(AT_SCALE_COLUMNS, rows),
        ]
    )


def label(run: dict) -> str:
    """Return the name of a run in the figure: its optimizer, with the codec, and INT8 weights."""
    weights = "INT8 weights" if run.get("weights") == INT8 else None
    remarks = ", ".join(filter(None, [run["codec"], weights]))
    return run["optimizer"] + (f" ({remarks})" if remarks else "")


def plot(runs: list[dict], path: Path) -> None:
    """Draw both runs' train and validation losses over the steps."""
    from matplotlib.figure import Figure  # of zero8[train]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, color, dash in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        name = label(run)
        steps = range(1, len(run["train_curve"]) + 1)
        axes.plot(steps, run["train_curve"], color=color, alpha=0.3, linewidth=1)
        axes.plot(
            *zip(*run["val_curve"], strict=True),
            color=color,
            linestyle=dash,
            marker="o",
            markersize=4,
            label=f"{name}, validation ({run['val_loss']:.4f} at the end)",
        )
        axes.plot([], [], color=color, alpha=0.3, label=f"{name}, train")
    entropy, config = runs[0]["unigram_entropy"], Path(runs[0]["config"])
    axes.axhline(
        entropy, color="gray", linestyle=":", label=f"unigram entropy of validation ({entropy:.3f})"
    )
    axes.set(
        xlabel="optimizer step",
        ylabel="loss (nats per byte)",
        title=f"Byte-level GPT, {runs[0]['parameters'] / 1e6:.2f} M parameters, {config.name}",
    )
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=150)


def report(out: Path, optimizer: str, scale: dict, command: str) -> dict:
    """Write OUT/summary.json and OUT/loss.png, print the tables, and return the summary.

    Args:
        out: the folder of both runs.
        optimizer: zero8's.
        scale: what `at_scale.measure` returned.
        command: what made the runs, for the record.
    """
    runs = read_runs(out, optimizer)
    summary = summarize(runs, scale, command)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(runs, out / "loss.png")
    print(text(summary))
    print(f"codec of {optimizer}: {runs[1]['codec']}")
    print(f"wrote {out / 'summary.json'} and {out / 'loss.png'}")
    return summary


def main() -> None:
    """Compare the runs in a folder, and step both optimizers once more at scale."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.report", description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder of both runs")
    parser.add_argument("--optimizer", choices=TWINS, default="Adam8bitBlockwise")
    parser.add_argument("--command", default="", help="command that made the runs, for the record")
    arguments = parser.parse_args()
    with extras.explained(parser.prog):
        extras.need("cpuinfo", "matplotlib")
        out, optimizer = arguments.out, arguments.optimizer
        engine, codec = (read_runs(out, optimizer)[1][key] for key in ("engine", "codec"))
        scale = at_scale.measure(engine, optimizer, codec)
        report(out, optimizer, scale, arguments.command)


if __name__ == "__main__":
    main()
