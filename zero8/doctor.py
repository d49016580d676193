# SPDX-License-Identifier: Apache-2.0
"""Check whether zero8 works on this machine."""

import argparse
import importlib
import importlib.metadata as metadata
import os
import pkgutil
import platform
import re
import time
from pathlib import Path

from packaging.specifiers import SpecifierSet

import zero8
from zero8.deepspeed import seams
from zero8.environment.versions import TESTED
from zero8.op import build, cuda, cuda_compile, kernel
from zero8.op.threads import step_threads
from zero8.optimizer.elementwise import Adam8bitBlockwise

TORCH_NAMES = {
    "torch._compile._disable_dynamo": "keeps steps out of compiled graphs",
    "torch._C._disabled_torch_function_impl": "keeps moments from being wrapped",
    "torch._C.DisableTorchFunctionSubclass": "has buffers act as plain tensors",
    "torch._C._set_throw_on_mutable_data_ptr": "keeps moments' addresses secret",
    "torch._C._DisableAutocast": "keeps the arithmetic of steps out of autocast",
    "torch.Tensor._make_wrapper_subclass": "makes the tensors of moments",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "notices hooks of all steps",
    "torch.optim.optimizer._global_optimizer_post_hooks": "notices hooks of all steps",
    "torch.optim.Optimizer._process_value_according_to_param_policy": "casts entries of other code",
    "torch.utils._pytree.tree_map_only": "finds moments among arguments",
    "torch.utils._pytree.tree_leaves": "finds tensors among results",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "recognizes tensors of others",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": "makes the DTensors of states",
    "torch.distributed.tensor._dtensor_spec.TensorMeta": "makes the DTensors of states",
    "torch.distributed.tensor.placement_types._StridedShard": "recognizes shards of rows that are "
    "not consecutive",
    "torch.distributed.tensor.placement_types.Shard._split_tensor": "computes a rank's rows",
    "torch.distributed.ProcessGroup._device_types": "chooses a reduction's device",
}
"""The private names of torch that zero8 relies on, and what it does with each.

torch may change them in any release; `tests/package/test_torch_names.py` finds each use.
"""
FITTING = "fits"  # names lines that only verbose reports show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    help_text = "list every seam, the places where zero8 changes DeepSpeed"
    parser.add_argument("--verbose", action="store_true", help=help_text)


def run(arguments: argparse.Namespace) -> tuple[int, dict, str]:
    """Return exit status, JSON object and text."""
    report = examine()
    return int(not report["usable"]), report, as_text(report, arguments.verbose)


def examine() -> dict:
    """Return the findings as plain data, and as "lines" for people; builds the op if needed.

    "problems" keep zero8 from working, "warnings" do not; it is "usable" without problems.
    """
    report: dict = {"lines": [("package", str(Path(__file__).parent))]}
    report |= {"problems": [], "warnings": []}
    for name, part in (
        ("deepspeed", _deepspeed),  # whose absence the next one knows
        ("versions", _versions),
        ("torch_names", _torch_names),
        ("build_tools", _build_tools),
        ("op", _op),
        ("cuda_kernel", _cuda_kernel),
        ("autoload", _autoload),
    ):
        try:
            report[name] = part(report)
        except Exception as error:  # the other parts are still useful
            report[name] = None
            report["problems"].append(f"{name}: {type(error).__name__}: {error}")
    report["usable"] = not report["problems"]
    return report


def as_text(report: dict, verbose: bool = False) -> str:
    """Return the report of `examine` as lines for people; verbose: with the seams that fit."""
    lines = [line for line in report["lines"] if verbose or line[0] != FITTING]
    lines += [("warning", text) for text in report["warnings"]]
    lines += [("problem", text) for text in report["problems"]]
    lines.append(("usable", "yes" if report["usable"] else "no"))
    return "\n".join(f"{key:<18}{value}" for key, value in lines)


def _versions(report: dict) -> dict:
    """Return each version and whether it is in the tested range."""
    tested = {k: v for k, v in TESTED.items() if k != "deepspeed" or report["deepspeed"]}
    found = {"python": platform.python_version(), "zero8": zero8.__version__}
    found |= {name: metadata.version(name) for name in tested}
    versions: dict = {}
    for name, installed in found.items():
        versions[name], text = {"installed": installed}, installed
        if name in tested:
            expected = ">={},<{}".format(*tested[name])
            fits = SpecifierSet(expected).contains(installed, prereleases=True)
            versions[name] |= {"tested": expected, "fits": fits}
            text += f" ({'tested' if fits else 'UNTESTED, tested are'} {expected})"
            report["warnings"] += [f"{name} {installed} is untested: {expected}"] * (not fits)
        report["lines"].append((name, text))
    return versions


def _torch_names(report: dict) -> dict:
    """Return how many private names of torch zero8 uses, and which this torch lacks."""
    missing = [name for name in TORCH_NAMES if not _is_there(name)]
    torch = f"torch {metadata.version('torch')}"
    report["warnings"] += [
        f"{torch} has no {name}, with which zero8 {TORCH_NAMES[name]}" for name in missing
    ]
    return {"used": len(TORCH_NAMES), "missing": missing}


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _build_tools(report: dict) -> dict:
    is_needed = build.library() != build.INSTALLED
    absent = "not found" if is_needed else "not found, and not needed"
    compiler = build.compiler()
    report["lines"].append(("compiler", compiler or absent))
    return {"compiler": compiler}


def _op(report: dict) -> dict:
    began = time.perf_counter()
    op = {"path": kernel.module().__file__}
    op["load_seconds"] = round(time.perf_counter() - began, 3)
    op["installed"] = op["path"] == str(build.INSTALLED)
    op["compiled_for"] = list(kernel.module().isas())
    op |= {"instruction_sets": list(kernel.isas()), "used": kernel.default_isa()}
    op["threads"] = step_threads() if kernel.module().has_threads() else 1
    origin = "of the wheel" if op["installed"] else "compiled here"
    report["lines"] += [
        ("op", f"{op['path']} ({origin}, loaded in {op['load_seconds']:.1f} s)"),
        ("compiled for", ", ".join([platform.machine(), *op["compiled_for"]])),
        ("this processor", ", ".join(op["instruction_sets"])),
        ("used", f"{op['used']}, threads: {op['threads']}"),
    ]
    return op


def _cuda_kernel(report: dict) -> dict:
    """Return the compiler of the CUDA kernel and the reason for it, or for None, and the GPUs."""
    gpus = [gpu._asdict() for gpu in cuda.gpus()]
    asked, lines = cuda_compile.default_backend(), report["lines"]
    try:
        name, version = cuda_compile.compiler(asked)[:2]
        reason = "nvcc comes before nvrtc" if name == "nvcc" else "there is no nvcc"
        reason = reason if asked == "auto" else "ZERO8_CUDA_BACKEND selects it"
        release = re.search(r"\d+\.\d+", version)  # nvcc's line also has a build number
        text = f"{name} {release[0] if release else version} compiles it where it is needed"
        lines.append(("cuda kernel", f"experimental, not yet run on a GPU; {text} ({reason})"))
    except (RuntimeError, ValueError) as error:
        name, version, reason = None, None, str(error)
        lines.append(("cuda kernel", f"cannot be compiled: {reason}"))
        if gpus:
            report["warnings"].append(f"parameters on a GPU cannot step: {reason}")
    for gpu in gpus:
        served = "" if gpu["is_served"] else ": NOT SERVED, keep parameters on the CPU"
        capability = gpu["architecture"] / 10
        lines.append(("gpu", f"{gpu['name']}, compute capability {capability}{served}"))
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
    from deepspeed.ops.op_builder import AsyncIOBuilder

    device, libaio = get_accelerator().device_name(), AsyncIOBuilder().is_compatible(verbose=False)
    lines.append(("accelerator", device))
    if not libaio:
        lines.append(("nvme", "no libaio, which it needs: apt-get install libaio-dev"))
    states, version = _installed_seams(report), metadata.version("deepspeed")
    fit = sum(state != "missing" for state in states.values())
    lines.append(("seams", f"{fit} of {len(states)} fit DeepSpeed {version}"))
    for name, state in states.items():
        key = "seam" if state == "missing" else FITTING
        lines.append((key, f"{name}: {state} (DeepSpeed {version})"))
    return {"accelerator": device, "libaio": libaio, "seams": states}


def _installed_seams(report: dict) -> dict[str, str]:
    """Return the states: "missing", "present", or "installed", of all if none is missing."""
    changed = [seam for seam in seams.SEAMS if seam.without]
    missing = [seam for seam in changed if seam.state == "missing"]
    for seam in missing:
        report["problems"].append(f"this DeepSpeed lacks {seam}")
    if not missing:
        seams.fit(Adam8bitBlockwise)
    return {seam.label: seam.state for seam in changed}


def _autoload(report: dict) -> dict:
    """Return whether `import torch` alone registers the optimizer; `import zero8` always does."""
    reason = None
    if not metadata.entry_points(group="torch.backends", name="zero8"):
        reason = "zero8 is not installed"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        reason = "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
    report["lines"].append(("autoload", f"inactive: {reason}" if reason else "active"))
    return {"active": reason is None, "reason": reason}
