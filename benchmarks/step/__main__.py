# SPDX-License-Identifier: Apache-2.0
"""Measure steps on a CPU or a GPU: zero8's, other optimizers', and copies of the same memory.

Times one algorithm after the other, the steps of each in turns.  Writes OUT (JSON), and a table
(.md) beside it.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import record
from benchmarks.step.contenders import (
    ZERO8,
    Contender,
    Params,
    copies,
    cpu_ns,
    gpu_ns,
    peer_contenders,
    zero8_contenders,
)
from benchmarks.step.peers import PEERS
from zero8.bench import COLUMNS, in_turns, multiple, spread, threads
from zero8.op import kernel
from zero8.spec.codec import CODECS

MODULE = "benchmarks.step"
ROUNDS = 30
NUMEL = {"cpu": 2**25, "cuda": 2**26}
"""Default number of parameters, which no cache holds, by device."""
NOTES = {
    "cpu": "Medians of wall time of `step()`, all in turns.",
    "cuda": "Medians of times between CUDA events around `step()`, all in turns. The GPU sleeps "
    "until the host has launched everything, so they exclude the host's time, `host us`.",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = record.parser(MODULE, __doc__)
    add = made.add_argument
    add("--device", choices=NUMEL, default="cpu", help="default cpu")
    sizes = ", ".join(f"{numel} on {device}" for device, numel in NUMEL.items())
    add("--numel", type=partial(multiple, COLUMNS), help=f"parameters, default {sizes}")
    all_threads = torch.get_num_threads()
    help_text = "threads on the CPU, default all"
    add("--threads", type=partial(multiple, 1), default=all_threads, help=help_text)
    for option, valid in (("algorithm", ZERO8), ("codec", CODECS), ("against", PEERS)):
        names = record.names_of(valid)
        help_text = f"default {','.join(valid)}"
        add(f"--{option}", type=names, default=tuple(valid), metavar="NAME,...", help=help_text)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write both files, print the table; return the exit status."""
    made = parser()
    asked = made.parse_args(argv)
    on_gpu = asked.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        made.error(f"--device cuda: torch {torch.__version__} finds no GPU")
    asked.numel = asked.numel or NUMEL[asked.device]
    gpu = torch.cuda.get_device_name() if on_gpu else None
    isa = f"{gpu}, CUDA {torch.version.cuda}" if on_gpu else kernel.default_isa()
    result = record.environment(MODULE) | {"device": asked.device, "isa": isa, **measure(asked)}
    title = f"Optimizer steps, {asked.numel:,} parameters, {isa}, {asked.threads} thread(s)"
    record.write(result, asked.json, markdown, title)
    print(*markdown(result), sep="\n")
    return 0


def measure(asked: argparse.Namespace) -> dict:
    """Return the rows of all algorithms that are asked for, and what could not step."""
    params, skipped = Params(asked.numel, asked.device), {}
    rows: list[dict] = []
    with threads(asked.threads):
        for algorithm in asked.algorithm:
            print(f"{algorithm} ...", file=sys.stderr, flush=True)
            ours = zero8_contenders(algorithm, asked.codec, params)
            peers, missing = peer_contenders(algorithm, asked.against, params)
            skipped |= missing
            rows += _timed(algorithm, [*ours, *peers], asked.device)
    sizes = {"numel": asked.numel, "threads": asked.threads}
    return sizes | {"rows": rows, "skipped": skipped}


def _timed(algorithm: str, steps: list[Contender], device: str) -> list[dict]:
    contenders = [*steps, *copies(steps)]
    time_of = gpu_ns if device == "cuda" else cpu_ns
    times = in_turns([partial(time_of, one.step) for one in contenders], ROUNDS)
    rows = []
    for one, pairs in zip(contenders, times, strict=True):
        ns, hosts_ns = zip(*pairs, strict=True)
        median, *tenths = (time / one.param.numel() for time in spread(ns))
        rows.append(
            {
                "algorithm": algorithm,
                "name": one.name,
                "variant": one.variant,
                "codec": one.codec,
                "numel": one.param.numel(),
                "bytes_per_param": one.bytes_per_param,
                "ns_per_param": median,
                "ns_per_param_p10": tenths[0],
                "ns_per_param_p90": tenths[1],
                "gb_per_s": one.bytes_per_param / median,
                "host_us": min(hosts_ns) / 1e3,
            }
        )
    return [row | _compared(row, rows) for row in rows]


def _compared(row: dict, rows: list[dict]) -> dict:
    """Return a row's speed over the copy of its bytes, and over DeepSpeed's fp32 step."""

    def speed_over(name: str, **kind: object) -> float | None:
        wanted = {"name": name, **kind}.items()
        return next((r["ns_per_param"] / ns for r in rows if wanted <= r.items()), None)

    ns, same = row["ns_per_param"], ("variant", "bytes_per_param")
    return {
        "of_copy": speed_over("copy", **{key: row[key] for key in same}),
        "speed_over_deepspeed_fp32": speed_over("deepspeed", variant="fp32"),
    }


def markdown(result: dict) -> list[str]:
    """Return the lines of a result's table."""
    on_gpu = result["device"] == "cuda"
    form = "{:.4f}" if on_gpu else "{:.3f}"
    columns = {
        "step": ("label", record.TEXT),
        "ns/param": ("ns_per_param", form),
        "10 %": ("ns_per_param_p10", form),
        "90 %": ("ns_per_param_p90", form),
        "bytes/param": ("bytes_per_param", "{:g}"),
        "GB/s": ("gb_per_s", "{:.1f}"),
        "of its copy": ("of_copy", "{:.2f}"),
    }
    if on_gpu:
        columns["host us"] = "host_us", "{:.0f}"
    else:
        columns["speed over DeepSpeed fp32"] = "speed_over_deepspeed_fp32", "{:.2f}"
    smaller = {row["name"]: row["numel"] for row in result["rows"]}
    return [
        *record.table_of([row | {"label": _label(row)} for row in result["rows"]], columns),
        "",
        f"{NOTES[result['device']]} A copy reads and writes a step's arrays without computing; "
        "`of its copy` is the copy's time over the step's. `bytes/param` are read or written: the "
        "gradient once, parameters and states twice, without scales of blocks (0.05 to 0.3 bytes).",
        *(
            f"{name} is timed on {numel:,} parameters."
            for name, numel in smaller.items()
            if numel < result["numel"]
        ),
        *(f"Skipped {name}: {reason}" for name, reason in result["skipped"].items()),
    ]


def _label(row: dict) -> str:
    codec = f"`{row['codec']}`" if row["codec"] else None
    return " ".join(filter(None, (row["name"], row["algorithm"], row["variant"], codec)))


if __name__ == "__main__":
    sys.exit(main())
