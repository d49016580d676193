# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint inspect`: shows the contents of a checkpoint, and how its codes are used."""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from zero8.checkpoint.commands.param_counts import Found, ParamCounts
from zero8.checkpoint.read.open import open_checkpoint
from zero8.checkpoint.read.source import Key, Source, in_threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("path", type=Path, metavar="DIR", help="a checkpoint: folder or file")
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw how often each code is used, per parameter"
    )


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    if arguments.plot is not None:
        from zero8.checkpoint.commands.histograms import plot  # needs matplotlib
    source = open_checkpoint(arguments.path)
    found = count(source)
    result = summary(source, found)
    lines = text(result)
    if arguments.plot is not None:
        plot(found, arguments.plot)
        lines += f"\nwrote {arguments.plot}"
    return 0, result, lines


def count(source: Source) -> Found:
    """Return the counts of each parameter, by part of the model and name.

    Raises:
        ValueError: if a file or a parameter is damaged.
    """
    source.check()

    def counted(key: Key) -> ParamCounts:
        return ParamCounts.of(source.parameter(key, with_weights=False))

    return dict(sorted(in_threads("inspect", source.keys(), counted)))


def summary(source: Source, found: Found) -> dict:
    """Return the JSON object: facts of the whole, and an entry per parameter."""
    codecs = Counter(p.codec.name for p in found.values() if p.block_size)
    sizes = Counter(p.block_size for p in found.values() if p.block_size)
    sizes_bytes = source.sizes_bytes()
    return {
        "path": str(source.path),
        **asdict(source.facts()),
        "files": len(sizes_bytes),
        "bytes": sum(sizes_bytes.values()),
        "codecs": sorted(codecs),
        "block_sizes": sorted(sizes),
        "steps": sorted({p.step for p in found.values()}),
        "numel": sum(p.numel for p in found.values()),
        "numel_8bit": sum(p.numel for p in found.values() if p.block_size),
        "params": [
            {"name": name, **({"part": part} if part else {}), **param.entry()}
            for (part, name), param in found.items()
        ],
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
    quantized = [param for param in result["params"] if param["bits"] < 32]
    rows = [_row(param, name) for param in quantized for name in _moments_of(param)]
    headers = ["parameter", "shape", "moment", "codes used", "zeros %", "at top %", "at floor %"]
    table = tabulate(rows, [*headers, "scales"], disable_numparse=True)
    others = len(result["params"]) - len(quantized)
    return f"{head}\n{table}\n{others} parameter(s) with float32 moments"


def _moments_of(param: dict) -> list[str]:
    """Return the names of the moments in a parameter's JSON object."""
    return [key for key, value in param.items() if isinstance(value, dict)]


def _row(param: dict, moment_name: str) -> list[str]:
    moment = param[moment_name]
    first = moment_name == _moments_of(param)[0]
    name = param["name"] if "part" not in param else f"{param['part']}/{param['name']}"
    cells = [
        name if first else "",
        "x".join(map(str, param["shape"])) if first else "",
        moment_name,
    ]
    shares = (f"{100 * moment[key]:.2f}" for key in ("zeros", "at_top", "at_floor"))
    scales = f"{moment['scale_min']:.1e} to {moment['scale_max']:.1e}"
    return [*cells, f"{moment['codes_used']} of {moment['codes']}", *shares, scales]
