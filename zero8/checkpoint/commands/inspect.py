# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint inspect`: shows the contents of a checkpoint, and how its codes are used."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined import joined
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.read.source import Source, in_threads
from zero8.checkpoint.read.statistics import counts_of, order_of_codes, summary

MOST_ROWS = 60
"""The number of parameters in the plot, the largest ones, so that rows stay readable."""


class Counted(NamedTuple):
    """The JSON object of a parameter, and the share of each code of its 8-bit moments.

    Shares are in the order of the codes' values.
    """

    entry: dict
    shares: dict[str, Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=Path, metavar="DIR", help="a checkpoint: folder or file")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw how often each code is used, per parameter"
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    if arguments.plot is not None:
        from matplotlib.figure import Figure  # which may be missing: before the work
    source = open_checkpoint(arguments.path)
    found = count(source)
    result = result_of(source, [one.entry for one in found])
    lines = text(result)
    if arguments.plot is not None:
        plot(found, Figure((12, 4)), arguments.plot)
        lines += f"\nwrote {arguments.plot}"
    return 0, result, lines


def count(source: Source) -> list[Counted]:
    """Return the counts of each parameter, by name."""

    def counted(name: str) -> Counted:
        return _counted(joined(source.fragments(name), with_weights=False))

    return [one for _, one in in_threads("inspect", sorted(source.names), counted)]


def _counted(parameter: Fragment) -> Counted:
    piece, stores = parameter.piece, parameter.stores
    codec = stores[0].codec if piece.is_quantized else None
    entry = {
        "name": parameter.name,
        "shape": list(piece.shape),
        "numel": piece.numel,
        "bits": codec.bits_of(parameter.algorithm.moments) if codec else 32,
        "block_size": piece.block_size,
        "codec": codec.name if codec else None,
        "step": parameter.step,
    }
    shares = {}
    for store in stores:
        counts = counts_of(store)
        entry[store.name] = summary(store, counts)
        if codec:
            ordered = counts[order_of_codes(store.code)].double()
            shares[store.name] = ordered / max(1, piece.numel)
    return Counted(entry, shares)


def result_of(source: Source, params: list[dict]) -> dict:
    """Return the JSON object: facts of the whole, and an entry per parameter."""
    quantized = [param for param in params if param["codec"]]
    return {
        "path": str(source.path),
        "kind": source.kind,
        "world_size": source.world_size,
        "stage": source.stage,
        "files": len(source.files),
        "bytes": sum(file.stat().st_size for file in source.files),
        "codecs": sorted({param["codec"] for param in quantized}),
        "block_sizes": sorted({param["block_size"] for param in quantized}),
        "steps": sorted({param["step"] for param in params}),
        "numel": sum(param["numel"] for param in params),
        "numel_8bit": sum(param["numel"] for param in quantized),
        "params": params,
    }


def text(result: dict) -> str:
    """Return the lines for people."""
    stage = "" if result["stage"] is None else f", ZeRO stage {result['stage']}"
    ranks = "" if result["world_size"] is None else f", written by {result['world_size']} rank(s)"
    codecs = ", ".join(f"`{name}`" for name in result["codecs"]) or "none"
    blocks = ", ".join(map(str, result["block_sizes"])) or "none"
    share = 100 * result["numel_8bit"] / max(1, result["numel"])
    head = (
        f"{result['path']}: {result['kind']}{stage}{ranks}; {result['files']} file(s), "
        f"{result['bytes'] / 2**20:.1f} MiB\n"
        f"step {', '.join(map(str, result['steps']))}; codec {codecs}, blocks of {blocks}; "
        f"{result['numel']} elements, {share:.1f} % of them 8-bit\n"
    )
    quantized = [param for param in result["params"] if param["codec"]]
    rows = [row for param in quantized for row in _rows(param)]
    headers = ["parameter", "shape", "moment", "codes used", "zeros %", "at top %", "at floor %"]
    table = tabulate(rows, [*headers, "scales"], disable_numparse=True)
    others = len(result["params"]) - len(quantized)
    return f"{head}\n{table}\n{others} parameter(s) with float32 moments"


def _rows(param: dict) -> list[list[str]]:
    """Return a row for each moment of a parameter, the first with its name and shape."""
    cells, rows = [param["name"], "x".join(map(str, param["shape"]))], []
    for name, moment in param.items():
        if isinstance(moment, dict):
            used = f"{moment['codes_used']} of {moment['codes']}"
            shares = (f"{100 * moment[key]:.2f}" for key in ("zeros", "at_top", "at_floor"))
            scales = f"{moment['scale_min']:.1e} to {moment['scale_max']:.1e}"
            rows.append([*cells, name, used, *shares, scales])
            cells = ["", ""]
    return rows


def plot(found: list[Counted], figure: Any, path: Path) -> None:
    """Draw into a figure the share of each code for each moment, in total and per parameter."""
    numel = [param.entry["numel"] for param in found if param.shares]
    if not numel:
        raise ValueError("--plot: the checkpoint has no 8-bit moments")
    smallest = sorted(numel)[-MOST_ROWS:][0]
    params = [p for p in found if p.shares and p.entry["numel"] >= smallest][:MOST_ROWS]
    figure.set(size_inches=(12, 4 + 0.16 * len(params)), layout_engine="constrained")
    names = list(dict.fromkeys(name for param in params for name in param.shares))
    heights = (1, 0.25 + 0.06 * len(params))
    axes = figure.subplots(2, len(names), height_ratios=heights, squeeze=False)
    for column, name in enumerate(names):
        having = [param for param in params if name in param.shares]
        shares = torch.stack([param.shares[name] for param in having])
        weights = torch.tensor([float(param.entry["numel"]) for param in having])
        total = (shares * weights[:, None]).sum(0) / weights.sum()
        top, below = axes[0][column], axes[1][column]
        top.bar(range(len(total)), 100 * total.numpy(), width=1.0, color="#4477aa")
        top.set(title=f"{name}: share of each code, %", xlim=(-0.5, len(total) - 0.5))
        logarithms = shares.clamp(min=1e-7).log10().numpy()
        image = below.imshow(logarithms, aspect="auto", interpolation="nearest", vmin=-7, vmax=-1)
        labels = [param.entry["name"][-40:] for param in having]
        below.set_yticks(range(len(labels)), labels, fontsize=6)
        below.set_xlabel("codes, in the order of their values")
        figure.colorbar(image, ax=below, label="log10 of the share")
    figure.savefig(path, dpi=120)
