# SPDX-License-Identifier: Apache-2.0
"""Check whether zero8 works on this machine."""

import argparse
import importlib
import importlib.metadata as metadata
import json
import os
import platform
from functools import partial
from pathlib import Path

import torch

import zero8
from zero8.deepspeed import seams
from zero8.environment.host_memory import UNROUNDED, Placement, max_round_mib
from zero8.environment.packages import TESTED, tested
from zero8.op import build, cuda, cuda_compile, kernel
from zero8.op.threads import step_threads
from zero8.optimizer.elementwise import Adam8bitBlockwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    help_text = "a DeepSpeed config, to look at what it does to this machine's memory"
    parser.add_argument("--ds-config", type=Path, metavar="JSON", help=help_text)


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    report = examine(arguments.ds_config)
    return int(not report["usable"]), report, as_text(report)


def examine(ds_config: Path | None = None) -> dict:
    """Return the findings as plain data, and as "lines" for people; builds the op if needed.

    A DeepSpeed config is looked at, too, if it is given.

    "problems" keep zero8 from working, "warnings" do not; it is "usable" without problems.
    """
    lines = [("package", str(Path(__file__).parent))]
    report: dict = {"lines": lines, "problems": [], "warnings": []}
    for name, part in (
        ("deepspeed", _deepspeed),  # whose absence the next one knows
        ("versions", _versions),
        ("build_tools", _build_tools),
        ("op", _op),
        ("cuda_kernel", _cuda_kernel),
        ("autoload", _autoload),
        ("page_locked", partial(_page_locked, ds_config)),
        ("numa", _numa),
    ):
        try:
            report[name] = part(report)
        except Exception as error:  # the other parts are still useful
            report[name] = None
            report["problems"].append(f"{name}: {type(error).__name__}: {error}")
    report["usable"] = not report["problems"]
    return report


def as_text(report: dict) -> str:
    """Return the report of `examine` as lines for people."""
    lines = report["lines"] + [("warning", text) for text in report["warnings"]]
    lines += [("problem", text) for text in report["problems"]]
    lines.append(("usable", "yes" if report["usable"] else "no"))
    return "\n".join(f"{key:<18}{value}" for key, value in lines)


def _versions(report: dict) -> dict:
    """Return each version and whether it is in the tested range."""
    versions: dict = {"python": platform.python_version(), "zero8": zero8.__version__}
    report["lines"] += versions.items()
    versions = {name: {"installed": installed} for name, installed in versions.items()}
    for name in TESTED if report["deepspeed"] else TESTED.keys() - {"deepspeed"}:
        installed, expected, fits = tested(name)
        versions[name] = {"installed": installed, "tested": expected, "fits": fits}
        verdict = "tested" if fits else "UNTESTED, tested are"
        report["lines"].append((name, f"{installed} ({verdict} {expected})"))
        report["warnings"] += [f"{name} {installed} is untested: {expected}"] * (not fits)
    return versions


def _build_tools(report: dict) -> dict:
    compiler, is_needed = build.compiler(), build.library() != build.INSTALLED
    report["lines"].append(("compiler", compiler or "not found" + ", not needed" * (not is_needed)))
    return {"compiler": compiler}


def _op(report: dict) -> dict:
    module = kernel.module()
    op = {"path": module.__file__, "compiled_for": list(module.isas())}
    op["installed"] = op["path"] == str(build.INSTALLED)
    op |= {"instruction_sets": list(kernel.isas()), "used": kernel.default_isa()}
    op["threads"] = step_threads() if module.has_threads() else 1
    origin = "of the wheel" if op["installed"] else "compiled here"
    report["lines"] += [
        ("op", f"{op['path']} ({origin})"),
        ("compiled for", ", ".join([platform.machine(), *op["compiled_for"]])),
        ("this processor", ", ".join(op["instruction_sets"])),
        ("used", f"{op['used']}, threads: {op['threads']}"),
    ]
    return op


def _cuda_kernel(report: dict) -> dict:
    """Return the compiler of the CUDA kernel, or the reason why there is none, and the GPUs."""
    numbers, lines = range(torch.cuda.device_count()), report["lines"]
    gpus = [cuda.Gpu.of(number)._asdict() for number in numbers]
    name = version = reason = None
    try:
        name, version = cuda_compile.compiler(cuda_compile.default_backend())[:2]
        text = f"experimental, not yet run on a GPU; {name} {version} compiles it"
        lines.append(("cuda kernel", text))
    except (RuntimeError, ValueError) as error:
        reason = str(error)
        lines.append(("cuda kernel", f"cannot be compiled: {reason}"))
        if gpus:
            report["warnings"].append(f"parameters on a GPU cannot step: {reason}")
    for gpu in gpus:
        served = "" if gpu["is_served"] else ": NOT SERVED, keep parameters on the CPU"
        name_and_capability = f"{gpu['name']}, compute capability {gpu['architecture'] / 10}"
        lines.append(("gpu", name_and_capability + served))
    return {"backend": name, "version": version, "reason": reason, "gpus": gpus}


def _deepspeed(report: dict) -> dict | None:
    """Return what zero8 needs of DeepSpeed, None where it is not installed."""
    lines = report["lines"]
    try:
        importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        adds = "adds ZeRO, with states in CPU memory or on NVMe"
        lines.append(("deepspeed", f"not installed; pip install 'zero8[deepspeed]' {adds}"))
        return None
    from deepspeed.accelerator import get_accelerator

    lines.append(("accelerator", device := get_accelerator().device_name()))
    changed = [seam for seam in seams.SEAMS if seam.without]
    missing = [seam for seam in changed if seam.state == "missing"]
    report["problems"] += [f"this DeepSpeed lacks {seam}" for seam in missing]
    if not missing:
        seams.fit(Adam8bitBlockwise)
    fit, version = len(changed) - len(missing), metadata.version("deepspeed")
    lines.append(("seams", f"{fit} of {len(changed)} fit DeepSpeed {version}"))
    states = {seam.label: seam.state for seam in changed}  # missing, present or installed
    return {"accelerator": device, "seams": states}


def _page_locked(ds_config: Path | None, report: dict) -> dict | None:
    """Return whether torch rounds up what a config page-locks, None if it page-locks nothing."""
    config = json.loads(ds_config.read_text()) if ds_config else {}
    zero = config.get("zero_optimization", {})
    offloads = [zero.get(part) or {} for part in ("offload_optimizer", "offload_param")]
    is_locked = [o.get("device", "none") != "none" and o.get("pin_memory", True) for o in offloads]
    if not any(is_locked):
        return None
    threshold = max_round_mib(os.environ)
    text = "tensors as they are" if threshold is not None else "tensors rounded up"
    report["lines"].append(("page-locked", text))
    if threshold is None:
        report["warnings"].append(
            "torch rounds page-locked tensors up to powers of two of bytes; avoid it with "
            f"{UNROUNDED} (torch 2.13), or with DS_PIN_MEMORY_BACKEND=native; "
            "zero8 plan --ds-config says how much it is"
        )
    return {"max_round_mib": threshold}


def _numa(report: dict) -> dict:
    """Return on which nodes of the host's memory this process and its GPUs, or a rank's, are."""
    gpus = [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    rank = int(os.environ.get("LOCAL_RANK", len(gpus)))
    placement = Placement.of(os.sched_getaffinity(0), gpus[rank : rank + 1] or gpus)
    report["lines"].append(("host memory", str(placement)))
    report["warnings"] += [fault] if (fault := placement.fault()) else []
    return placement._asdict()


def _autoload(report: dict) -> dict:
    """Return whether `import torch` alone registers the optimizer; `import zero8` always does."""
    reason = None
    if not metadata.entry_points(group="torch.backends", name="zero8"):
        reason = "zero8 is not installed"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        reason = "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
    report["lines"].append(("autoload", f"inactive: {reason}" if reason else "active"))
    return {"active": reason is None, "reason": reason}
