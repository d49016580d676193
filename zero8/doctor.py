# SPDX-License-Identifier: Apache-2.0
"""`zero8 doctor`: checks whether zero8 works on this machine."""

import importlib
import importlib.metadata as metadata
import os
import platform
import re
import time
from dataclasses import asdict
from pathlib import Path

from packaging.specifiers import SpecifierSet

from zero8 import torch_names
from zero8.versions import TESTED
from zero8.zero import accelerate, seams


def examine() -> dict:
    """Return the findings as plain data; builds the op if it is not built.

    "problems" keep zero8 from working, "warnings" do not; it is "usable" without problems.
    """
    report: dict = {"problems": [], "warnings": []}
    for name, part in (
        ("deepspeed", _deepspeed),
        ("versions", _versions),
        ("torch_names", _torch_names),
        ("build_tools", _build_tools),
        ("locks", _locks),
        ("op", _op),
        ("cuda_kernel", _cuda_kernel),
        ("accelerator", _accelerator),
        ("libaio", _libaio),
        ("seams", _seams),
        ("accelerate", _accelerate),
        ("autoload", _autoload),
    ):
        if part in (_accelerator, _libaio, _seams) and not report["deepspeed"]:
            report[name] = None
            continue
        try:
            report[name] = part(report)
        except Exception as error:  # the other parts are still useful
            report[name] = None
            report["problems"].append(f"{name}: {type(error).__name__}: {error}")
    report["usable"] = not report["problems"]
    return report


def _deepspeed(report: dict) -> bool:
    """Return whether DeepSpeed is installed; plain PyTorch does not need it."""
    try:
        importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        return False
    return True


def _versions(report: dict) -> dict:
    """Return each version and whether it is in the tested range."""
    versions: dict = {"python": {"installed": platform.python_version()}}
    try:
        versions["zero8"] = {"installed": metadata.version("zero8")}
    except metadata.PackageNotFoundError:
        report["warnings"].append("zero8 is importable but not installed: `pip install` it")
    for name, (lowest, beyond) in TESTED.items():
        if name == "deepspeed" and not report["deepspeed"]:
            continue
        installed, tested = metadata.version(name), f">={lowest},<{beyond}"
        fits = SpecifierSet(tested).contains(installed, prereleases=True)
        versions[name] = {"installed": installed, "tested": tested, "fits": fits}
        if not fits:
            report["warnings"].append(f"{name} {installed} is untested: expected {tested}")
    return versions


def _torch_names(report: dict) -> dict:
    """Return how many private names of torch zero8 uses, and which this torch lacks."""
    missing = torch_names.missing()
    report["warnings"] += [
        f"torch {metadata.version('torch')} has no {name}, with which zero8 {name.use}"
        for name in missing
    ]
    return {"used": len(torch_names.NAMES), "missing": [str(name) for name in missing]}


def _build_tools(report: dict) -> dict:
    from zero8.op import build

    return {"compiler": build.compiler(), "ninja": build.ninja()}


def _op(report: dict) -> dict:
    from zero8.op import kernel
    from zero8.op.threads import step_threads

    began = time.perf_counter()
    path = kernel.module().__file__
    seconds = time.perf_counter() - began
    isas = list(kernel.isas())
    return {
        "path": path,
        "load_seconds": round(seconds, 3),
        "instruction_sets": isas,
        "used": kernel.default_isa(),
        "threads": step_threads(),
    }


def _locks(report: dict) -> list[dict]:
    """Return the locks of builds that are held, or that a killed build has left behind."""
    from zero8.op import build, locks

    found = locks.find(build.cache_root())
    report["warnings"] += [str(lock) for lock in found if lock.removable]
    return [asdict(lock) | {"text": str(lock)} for lock in found]


def _cuda_kernel(report: dict) -> dict:
    """Return the compiler of the CUDA kernel and the reason for it, or for None, and the GPUs."""
    from zero8.op import cuda, cuda_compile

    gpus = [gpu._asdict() for gpu in cuda.gpus()]
    asked = cuda_compile.default_backend()
    try:
        compiler = cuda_compile.compiler(asked)
    except (RuntimeError, ValueError) as error:
        if gpus:
            report["warnings"].append(f"parameters on a GPU cannot step: {error}")
        return {"backend": None, "version": None, "reason": str(error), "gpus": gpus}
    reason = "nvcc comes before nvrtc" if compiler.name == "nvcc" else "there is no nvcc"
    if asked != "auto":
        reason = "ZERO8_CUDA_BACKEND selects it"
    found = {"backend": compiler.name, "version": compiler.version, "reason": reason}
    return {**found, "gpus": gpus}


def _accelerator(report: dict) -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name()


def _libaio(report: dict) -> bool:
    """Return whether DeepSpeed finds libaio, which its op for swapping to NVMe needs."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)


def _seams(report: dict) -> dict[str, str]:
    """Return the state of each seam: "missing", "present", or "installed" (present and in use)."""
    from zero8.blockwise import BlockwiseOptimizer
    from zero8.optimizer import Adam8bitBlockwise

    changed = [seam for seam in seams.SEAMS if seam.change]
    missing = [seam for seam in changed if seam.state == "missing"]
    for seam in missing:
        text = f"this DeepSpeed lacks {seam.module}.{seam.name}"
        report["problems" if seam.essential else "warnings"].append(text)
    if not any(seam.essential for seam in missing):
        try:
            seams.install(BlockwiseOptimizer, Adam8bitBlockwise)
        except RuntimeError as error:
            report["problems"].append(str(error))
    return {seam.name: seam.state for seam in changed}


def _accelerate(report: dict) -> str | None:
    """Return the state of the guard against Accelerate replacing the optimizer, None without it."""
    from zero8.blockwise import BlockwiseOptimizer

    try:
        accelerator = importlib.import_module("accelerate.accelerator")
    except ImportError:
        return None
    accelerate.guard(accelerator, BlockwiseOptimizer)
    state = seams.state_of(getattr(accelerator, accelerate.REPLACES, None))
    if state == "missing":
        report["warnings"].append(accelerate.UNKNOWN)
    return state


def _autoload(report: dict) -> dict:
    """Return whether `import torch` alone registers the optimizer; `import zero8` always does."""
    reason = None
    if not metadata.entry_points(group="torch.backends", name="zero8"):
        reason = "zero8 is not installed"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        reason = "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
    return {"active": reason is None, "reason": reason}


def _cuda_line(found: dict | None) -> str:
    if not found:
        return "unknown"
    if not found["backend"]:
        return f"cannot be compiled: {found['reason']}"
    release = re.search(r"\d+\.\d+", found["version"])  # nvcc's line also has a build number
    compiler = f"{found['backend']} {release[0] if release else found['version']}"
    return (
        f"experimental, not yet run on a GPU; {compiler} compiles it where parameters are on one "
        f"({found['reason']})"
    )


def _gpu_lines(found: dict | None) -> list[tuple[str, str]]:
    gpus = found["gpus"] if found else []
    return [
        (
            "gpu",
            f"{gpu['name']}, compute capability {gpu['architecture'] / 10}"
            + ("" if gpu["is_served"] else ": NOT SERVED, keep parameters on the CPU"),
        )
        for gpu in gpus
    ]


def _deepspeed_lines(report: dict, verbose: bool) -> list[tuple[str, str]]:
    if report["deepspeed"] is False:
        adds = "adds ZeRO, with states in CPU memory or on NVMe"
        return [("deepspeed", f"not installed; pip install 'zero8[deepspeed]' {adds}")]
    lines = [("accelerator", report["accelerator"] or "unknown")]
    if report["libaio"] is False:
        lines.append(
            ("nvme", "no libaio, needed for NVMe offload only: apt-get install libaio-dev")
        )
    version = (report["versions"] or {}).get("deepspeed", {}).get("installed", "unknown")
    states = report["seams"] or {}
    listed = {name: state for name, state in states.items() if verbose or state == "missing"}
    fit = sum(state != "missing" for state in states.values())
    lines.append(("seams", f"{fit} of {len(states)} fit DeepSpeed {version}"))
    return lines + [
        ("seam", f"{name}: {state} (DeepSpeed {version})") for name, state in listed.items()
    ]


def as_text(report: dict, verbose: bool = False) -> str:
    """Return the report of `examine` as lines for people.

    Args:
        report: the result of `examine`.
        verbose: whether to list also the seams that fit.
    """
    lines = [("package", str(Path(__file__).parent))]
    for name, version in (report["versions"] or {}).items():
        fit = {True: "tested", False: "UNTESTED, tested are"}.get(version.get("fits"))
        expected = f" ({fit} {version['tested']})" if fit else ""
        lines.append((name, version["installed"] + expected))
    lines += [(k, v or "not found") for k, v in (report["build_tools"] or {}).items()]
    op = report["op"]
    if op:
        lines.append(("op", f"{op['path']} (loaded in {op['load_seconds']:.1f} s)"))
        lines.append(("instruction sets", ", ".join(op["instruction_sets"])))
        lines.append(("used", f"{op['used']}, threads: {op['threads']}"))
    else:
        lines.append(("op", "cannot be loaded"))
    locks = report["locks"] or []
    lines += [("lock", lock["text"]) for lock in locks if not lock["removable"]]
    lines.append(("cuda kernel", _cuda_line(report["cuda_kernel"])))
    lines += _gpu_lines(report["cuda_kernel"])
    lines += _deepspeed_lines(report, verbose)
    if report["accelerate"]:
        lines.append(("accelerate", f"{accelerate.REPLACES}: {report['accelerate']}"))
    autoload = report["autoload"] or {"active": False, "reason": "unknown"}
    why = "active" if autoload["active"] else f"inactive: {autoload['reason']}; import zero8"
    lines.append(("autoload", why))
    lines += [("warning", text) for text in report["warnings"]]
    lines += [("problem", text) for text in report["problems"]]
    lines.append(("usable", "yes" if report["usable"] else "no"))
    return "\n".join(f"{key:<18}{value}" for key, value in lines)
