# SPDX-License-Identifier: Apache-2.0
"""Estimate memory, traffic and step time of a training run, with fp32 Adam and with zero8."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from zero8.bench.step.machines import OTHERS
from zero8.plan.fit import Limits, verdict
from zero8.plan.model import Model
from zero8.plan.rates import RECORDED
from zero8.plan.report import GIB, summary, text
from zero8.plan.setup import (
    BY_NAME,
    DEVICES,
    ENGINES,
    WEIGHT_BYTES,
    WEIGHTS,
    Setup,
    with_deepspeed_config,
)
from zero8.plan.step_time import Hardware
from zero8.spec.codec import CODECS, DEFAULT_CODEC

TROUBLE = 2
"""Exit status of a failed plan, as of wrong usage."""

HOST = OTHERS[-1]
"""The default host."""

GPU_GB_PER_S = 3350.0
"""The memory bandwidth of an H100 SXM, by its data sheet."""

SETTINGS = ("engine", "stage", "offload", "dtype", "optimizer", "codec")
"""Options that a DeepSpeed config replaces."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", metavar="SIZE", help="number of parameters: 350M, 8B, 1.5T")
    model.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="config.json of a Hugging Face model, or a JSON object of parameter names and shapes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the plan")
    run = parser.add_argument_group("the run")
    run.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks; default 1")
    run.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="default 8")
    run.add_argument(
        "--ds-config", type=Path, metavar="JSON", help="DeepSpeed config with all settings below"
    )
    run.add_argument("--engine", choices=ENGINES, help="default deepspeed")
    run.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of ZeRO, default 2")
    run.add_argument("--offload", choices=DEVICES, help="of optimizer states; default cpu")
    help_text = (
        "default bf16; bf16-masters: without fp32 master weights; 24-bit-masters: the same, with "
        "weight_correction_bits 8"
    )
    run.add_argument("--dtype", choices=tuple(WEIGHT_BYTES), help=help_text)
    help_text = (
        "default plain; int8: torchao's INT8 weights, with a scale per row, under fsdp2; as a plan "
        "knows no layers, it takes all matrices without `embed` in their names for linear ones"
    )
    run.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help=help_text)
    optimizers = tuple(BY_NAME)
    run.add_argument("--optimizer", choices=optimizers, help=f"zero8's, default {optimizers[0]}")
    codecs = tuple(CODECS)
    run.add_argument("--codec", choices=codecs, help=f"of zero8's states, default {DEFAULT_CODEC}")
    fit = parser.add_argument_group("the available memory, to check whether the run fits")
    fit.add_argument("--host-memory", type=float, metavar="GIB", help="memory of each host")
    fit.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of each GPU")
    _add_hardware(parser.add_argument_group("the hardware, for the step time"))


def _add_hardware(group) -> None:
    group.add_argument(
        "--measure", action="store_true", help="measure this machine, in about 10 s when idle"
    )
    for option, what, default in (
        ("--cores", "cores of a host", f"default {HOST.cores}"),
        ("--bandwidth", "GB/s of a host's memory", f"default {HOST.gb_per_s:g}"),
        ("--nvme-bandwidth", "GB/s of a host's drives", "needed with offload to nvme"),
        ("--gpu-bandwidth", "GB/s of a GPU's memory", f"default {GPU_GB_PER_S:g}"),
    ):
        kind = int if option == "--cores" else float
        group.add_argument(option, type=kind, metavar="N", help=f"{what}; {default}")


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    try:
        return _planned(arguments)
    except (ValueError, OSError) as error:
        return TROUBLE, {"error": str(error)}, f"zero8 plan: {error}"


def _planned(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    if arguments.parameters is not None:
        model = Model.of_size(arguments.parameters)
    else:
        model = Model.of_file(arguments.model)
    setup = _setup(arguments)
    hardware = _hardware(arguments, setup)
    limits = _limits(arguments)
    found = None if limits is None else verdict(model, setup, limits)
    result = summary(model, setup, hardware, found)
    lines = text(model, setup, hardware, found)
    if arguments.plot is not None:
        from zero8.plan.figure import plot  # needs matplotlib

        plot(model, setup, hardware, arguments.plot)
        lines += f"\nwrote {arguments.plot}"
    return 0, result, lines


def _limits(arguments: argparse.Namespace) -> Limits | None:
    given = []
    for name in ("host_memory", "gpu_memory"):
        gib = getattr(arguments, name)
        if gib is not None and not 0 < gib < math.inf:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: got {gib}, expected GiB, more than 0")
        given.append(None if gib is None else int(gib * GIB))
    return None if given == [None, None] else Limits(*given)


def _setup(arguments: argparse.Namespace) -> Setup:
    given = {name: getattr(arguments, name) for name in SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    sizes = {"world_size": arguments.world_size, "ranks_per_host": arguments.ranks_per_host}
    sizes["weights"] = arguments.weights
    if arguments.ds_config is None:
        if "optimizer" in given:
            given["algorithm_name"] = BY_NAME[given.pop("optimizer")].algorithm.name
        return Setup(**sizes, **given)
    if given:
        raise ValueError(f"--ds-config: got --{next(iter(given))} too, which the config contains")
    config = json.loads(arguments.ds_config.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{arguments.ds_config}: not a JSON object, expected a DeepSpeed config")
    return with_deepspeed_config(Setup(**sizes), config)


def _hardware(arguments: argparse.Namespace, setup: Setup) -> Hardware:
    if setup.offload == "nvme" and arguments.nvme_bandwidth is None:
        raise ValueError("--nvme-bandwidth: expected GB/s of a host's drives, for offload to nvme")
    machine, rates = HOST, RECORDED
    if arguments.measure:
        from zero8.plan.measure import measure  # needs PyTorch

        machine, rates, _ = measure()
    given = {"cores": arguments.cores, "gb_per_s": arguments.bandwidth}
    given |= {"nvme": arguments.nvme_bandwidth, "gpu": arguments.gpu_bandwidth}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: got {value}, expected more than 0")
    host = {k: given[k] for k in ("cores", "gb_per_s") if given[k] is not None}
    return Hardware(replace(machine, **host), rates, given["nvme"], given["gpu"] or GPU_GB_PER_S)
