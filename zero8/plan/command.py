# SPDX-License-Identifier: Apache-2.0
"""Estimate memory, traffic and step time of a training run, with fp32 Adam and with zero8."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from zero8.environment.host_memory import UNROUNDED, max_round_mib
from zero8.plan.memory import ROUNDING, Memory, cases_of, needs, rows_of
from zero8.plan.model import Model
from zero8.plan.setup import BY_NAME, CHOICES, GPU, HOST, NVME, Setup, counted, with_ds_config
from zero8.plan.step_time import RECORD, Hardware, step_of
from zero8.spec.codec import CODECS, DEFAULT_CODEC

GIB = 2**30
OF_CONFIG = ("engine", "stage", "offload", "dtype", "optimizer", "codec")
"""Options that a DeepSpeed config replaces."""

HELP = {
    "engine": "default deepspeed",
    "stage": "stage of ZeRO; default 2",
    "offload": "where optimizer states are; default cpu",
    "dtype": "default bf16; bf16-masters: without fp32 master weights; 24-bit-masters: the same, "
    "with weight_correction_bits 8",
    "weights": "default plain; int8: under fsdp2, torchao's INT8 weights, with a scale per row, "
    "for all matrices without `embed` in their names",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; those that are not given are not in its namespace."""
    parser.set_defaults(run=run)
    parser.argument_default = argparse.SUPPRESS
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", metavar="SIZE", help="number of parameters: 350M, 8B, 1.5T")
    help_text = "config.json of a Hugging Face model, or a JSON object of names and shapes"
    model.add_argument("--model", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    add = parser.add_argument_group("the run").add_argument
    add("--world-size", type=int, metavar="N", help="ranks; default 1")
    add("--ranks-per-host", type=int, metavar="N", help="default 8")
    help_text = "DeepSpeed config, instead of the settings below"
    add("--ds-config", type=Path, metavar="JSON", help=help_text)
    for name, choices in CHOICES.items():
        add(f"--{name}", type=type(choices[0]), choices=choices, help=HELP[name])
    add("--optimizer", choices=BY_NAME, help=f"default {next(iter(BY_NAME))}")
    add("--codec", choices=CODECS, help=f"of 8-bit states; default {DEFAULT_CODEC}")
    add = parser.add_argument_group("memory limits, to check whether the run fits").add_argument
    for place in ("host", "gpu"):
        limit = {"dest": f"{place}_bytes", "type": partial(_positive, int, GIB), "metavar": "GIB"}
        add(f"--{place}-memory", **limit, help=f"of each {place if place == 'host' else GPU}")
    add = parser.add_argument_group("the hardware, for the step time").add_argument
    default = Hardware()
    add("--cores", type=partial(_positive, int, 1), help=f"of a host; default {default.cores}")
    help_text = "ns/param of one core, as `zero8 bench --threads 1` prints them; default: recorded"
    speed = partial(_positive, float, 1)
    add("--core-ns", type=speed, nargs=2, metavar=("FP32", "ZERO8"), help=help_text)
    help_text = f"GB/s of a host's memory; default {default.gb_per_s:g}"
    add("--bandwidth", dest="gb_per_s", type=speed, metavar="N", help=help_text)
    help_text = "GB/s of a host's drives; needed with offload to nvme"
    add("--nvme-bandwidth", dest="nvme_gb_per_s", type=speed, metavar="N", help=help_text)


def _positive(kind: type, unit: int, word: str) -> float:
    value = float(word) * unit
    if not 0 < value < float("inf") or not kind(value):
        raise argparse.ArgumentTypeError(f"got {word}, expected more than 0")
    return kind(value)


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text; bytes are of one rank, `need` of host and GPU."""
    given = vars(arguments)
    is_size = "parameters" in given
    model = Model.of_size(given["parameters"]) if is_size else Model.of_file(given["model"])
    setup, hardware = _setup(given), Hardware(**_those_of(Hardware, given))
    if setup.offload == "nvme" and hardware.nvme_gb_per_s is None:
        raise ValueError("--nvme-bandwidth: expected GB/s of a host's drives, for offload to nvme")
    result = {
        "model": model.title,
        "parameters": model.numel,
        "setup": asdict(setup),
        "hardware": asdict(hardware),
        "memory": [asdict(row) for row in rows_of(model, setup)],
    }
    for name, one in zip(("fp32_adam", "zero8"), setup.twins, strict=True):
        step = asdict(step_of(model, one, hardware))
        result[name] = {"need": asdict(needs(model, one)), "step": step}
    if limits := _those_of(Memory, given):
        there = Memory(**limits)
        result["limits"] = asdict(there)
        result["cases"] = [
            {"what": what, **asdict(need), "fits": need.fits(there)}
            for what, need in cases_of(model, setup, there)
        ]
    return 0, result, _text(result, setup, hardware)


def _those_of(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a dataclass that are given."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


def _setup(given: dict[str, Any]) -> Setup:
    settings = _those_of(Setup, given)
    settings["max_round_mib"] = max_round_mib(os.environ)  # as torch will read it in the run
    if "optimizer" in given:
        settings["algorithm_name"] = BY_NAME[given["optimizer"]].algorithm.name
    if "ds_config" not in given:
        return Setup(**settings)
    if both := [name for name in OF_CONFIG if name in given]:
        raise ValueError(f"--ds-config: got --{both[0]} too, which the config has")
    config = json.loads(given["ds_config"].read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{given['ds_config']}: not a JSON object, expected a DeepSpeed config")
    return with_ds_config(Setup(**settings), config)


# --- The result as text ---------------------------------------------------------------------------


def _text(result: dict, setup: Setup, hardware: Hardware) -> str:
    """Return the plan as a table with its assumptions, and the verdict if there are limits."""
    parts = [
        f"{result['model']}\n{setup.describe()}",
        tabulate(
            [*_memory_lines(result["memory"], setup.ranks_here), *_step_lines(result, setup)],
            ["", *(one.optimizer for one in setup.twins)],
            disable_numparse=True,
            colalign=["left", "right", "right"],
        ),
        "\n".join(_remarks(result, setup, hardware)),
    ]
    return "\n\n".join(parts if "cases" not in result else [*parts, _verdict(result)])


def _memory_lines(rows: list[dict], ranks: int) -> Iterator[list[str]]:
    for place, title, scale in (
        (GPU, "each GPU, GiB", 1),
        (HOST, f"each host ({counted(ranks, 'rank')}), GiB", ranks),
        (NVME, "NVMe of each host, GiB", ranks),
    ):
        lines = [
            [f"- {row['what']}", scale * row["fp32_bytes"], scale * row["zero8_bytes"]]
            for row in rows
            if row["place"] == place
        ]
        if lines:
            lines.insert(0, [title, *map(sum, list(zip(*lines, strict=True))[1:])])
        yield from ([name, *map(_gib, both)] for name, *both in lines)


def _step_lines(result: dict, setup: Setup) -> Iterator[list[str]]:
    steps = [result[name]["step"] for name in ("fp32_adam", "zero8")]
    ranks = setup.ranks_here
    place, scale = (GPU, 1) if setup.offload == "none" else ("host", ranks)
    for title, key, factor in (
        (f"step, memory of each {place}, GiB", "memory_bytes", scale),
        ("step, GPU link, both ways, GiB", "link_bytes", 1),
        ("step, NVMe of each host, each way, GiB", "nvme_bytes", ranks),
    ):
        shown = [_gib(factor * step[key]) for step in steps]
        if set(shown) != {_gib(0)}:
            yield [title, *shown]
    if steps[0]["seconds"] is not None:
        yield ["optimizer step, ms", *(f"{1e3 * step['seconds']:,.1f}" for step in steps)]
        yield ["- limited by", *(step["limit"] for step in steps)]


def _remarks(result: dict, setup: Setup, hardware: Hardware) -> Iterator[str]:
    yield "Not counted: activations, and what CUDA and allocators add."
    if any(row["what"] == ROUNDING for row in result["memory"]):
        yield f"torch does not round up large page-locked tensors with {UNROUNDED} (torch 2.13)."
    if result["zero8"]["step"]["seconds"] is None:
        yield "Step time: not estimated on GPUs, for Muon and for INT8 weights."
        return
    fp32_ns, zero8_ns = map(hardware.core_ns_of, setup.twins)
    cores = counted(hardware.cores, "core")
    yield f"Step time: for hosts of {cores} and {hardware.gb_per_s:g} GB/s."
    yield (
        f"One core takes {fp32_ns:.2f} ns/param for fp32 Adam, {zero8_ns:.2f} for zero8 "
        f"({'--core-ns' if hardware.core_ns else RECORD})."
    )
    if (setup.engine, setup.stage) == ("deepspeed", 3):
        yield (
            "step_in_forward hides it behind the next forward, except for the first sub-group and "
            "what is longer than the forward."
        )


def _verdict(result: dict) -> str:
    places = {"host_bytes": "each host, GiB", "gpu_bytes": "each GPU, GiB"}
    limits = ((title, result["limits"][key]) for key, title in places.items())
    headers = [title + (f", of {limit / GIB:g}" if limit else "") for title, limit in limits]
    rows = [
        [*(_gib(case[key]) for key in places), "yes" if case["fits"] else "NO", case["what"]]
        for case in result["cases"]
    ]
    align = [*["right"] * 3, "left"]
    return tabulate(rows, [*headers, "fits", "plan"], disable_numparse=True, colalign=align)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"
