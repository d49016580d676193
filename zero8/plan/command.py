# SPDX-License-Identifier: Apache-2.0
"""Estimate memory, traffic and step time of a training run, with fp32 Adam and with zero8."""

import argparse
import json
import os
from pathlib import Path

from zero8.environment.pinned_rounding import max_round_mib
from zero8.plan.memory import Memory
from zero8.plan.model import Model
from zero8.plan.report import GIB, Plan, summary, text
from zero8.plan.setup import BY_NAME, CHOICES, Setup, with_deepspeed_config
from zero8.plan.step_time import Hardware
from zero8.spec.codec import CODECS, DEFAULT_CODEC

OF_CONFIG = ("engine", "stage", "offload", "dtype", "optimizer", "codec")
"""Options that a DeepSpeed config replaces."""
NOT_OF_CONFIG = ("world_size", "ranks_per_host", "weights")

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
    """Add the options of the command."""
    parser.set_defaults(run=run)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", metavar="SIZE", help="number of parameters: 350M, 8B, 1.5T")
    help_text = "config.json of a Hugging Face model, or a JSON object of names and shapes"
    model.add_argument("--model", type=Path, metavar="FILE", help=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    of_run = parser.add_argument_group("the run")
    of_run.add_argument("--world-size", type=int, metavar="N", help="ranks; default 1")
    of_run.add_argument("--ranks-per-host", type=int, metavar="N", help="default 8")
    help_text = "DeepSpeed config, instead of the settings below"
    of_run.add_argument("--ds-config", type=Path, metavar="JSON", help=help_text)
    for name, choices in CHOICES.items():
        of_run.add_argument(f"--{name}", type=type(choices[0]), choices=choices, help=HELP[name])
    of_run.add_argument("--optimizer", choices=BY_NAME, help=f"default {next(iter(BY_NAME))}")
    of_run.add_argument("--codec", choices=CODECS, help=f"of 8-bit states; default {DEFAULT_CODEC}")
    there = parser.add_argument_group("memory limits, to check whether the run fits")
    there.add_argument("--host-memory", type=_positive, metavar="GIB", help="of each host")
    there.add_argument("--gpu-memory", type=_positive, metavar="GIB", help="of each GPU")
    _add_hardware(parser.add_argument_group("the hardware, for the step time"))


def _add_hardware(group: argparse._ArgumentGroup) -> None:
    default = Hardware()
    group.add_argument("--cores", type=_positive, help=f"of a host; default {default.cores}")
    help_text = "ns/param of one core, as `zero8 bench --threads 1` prints them; default: recorded"
    numbers = {"type": _positive, "nargs": 2, "metavar": ("FP32", "ZERO8")}
    group.add_argument("--core-ns", **numbers, help=help_text)
    for option, what in (
        ("--bandwidth", f"a host's memory; default {default.gb_per_s:g}"),
        ("--nvme-bandwidth", "a host's drives; needed with offload to nvme"),
    ):
        group.add_argument(option, type=_positive, metavar="N", help=f"GB/s of {what}")


def _positive(word: str) -> float:
    value = float(word)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {word}, expected more than 0")
    return value


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    plan = _plan(arguments)
    return 0, summary(plan), text(plan)


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.parameters is not None:
        model = Model.of_size(arguments.parameters)
    else:
        model = Model.of_file(arguments.model)
    setup = _setup(arguments)
    hardware = {
        "cores": arguments.cores and int(arguments.cores),
        "gb_per_s": arguments.bandwidth,
        "core_ns": arguments.core_ns and tuple(arguments.core_ns),
        "nvme_gb_per_s": arguments.nvme_bandwidth,
    }
    if setup.offload == "nvme" and arguments.nvme_bandwidth is None:
        raise ValueError("--nvme-bandwidth: expected GB/s of a host's drives, for offload to nvme")
    given = arguments.host_memory, arguments.gpu_memory
    there = Memory(*(gib and int(gib * GIB) for gib in given)) if any(given) else None
    return Plan(model, setup, Hardware(**_known(hardware)), there)


def _known(values: dict) -> dict:
    return {name: value for name, value in values.items() if value is not None}


def _setup(arguments: argparse.Namespace) -> Setup:
    given = _known(vars(arguments))
    sizes = {name: given[name] for name in NOT_OF_CONFIG if name in given}
    sizes["max_round_mib"] = max_round_mib(os.environ)  # as torch will read it in the run
    settings = {name: given[name] for name in OF_CONFIG if name in given}
    if arguments.ds_config is None:
        if "optimizer" in settings:
            settings["algorithm_name"] = BY_NAME[settings.pop("optimizer")].algorithm.name
        return Setup(**sizes, **settings)
    if settings:
        raise ValueError(f"--ds-config: got --{next(iter(settings))} too, which the config has")
    config = json.loads(arguments.ds_config.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{arguments.ds_config}: not a JSON object, expected a DeepSpeed config")
    return with_deepspeed_config(Setup(**sizes), config)
