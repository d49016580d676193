# SPDX-License-Identifier: Apache-2.0
"""The plan as one JSON object and as tables."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

from tabulate import tabulate

from zero8.environment.pinned_rounding import REMEDY_MIB, variable_of
from zero8.plan.memory import ROUNDING, Memory, cases_of, needs, rows_of, total
from zero8.plan.model import Model
from zero8.plan.setup import GPU, HOST, NVME, Setup, counted
from zero8.plan.step_time import RECORD, Hardware, steps_of

GIB = 2**30


class Plan(NamedTuple):
    """What is planned: a run on hardware, and the memory that is there, if it is given."""

    model: Model
    setup: Setup
    hardware: Hardware
    there: Memory | None


def summary(plan: Plan) -> dict:
    """Return the plan as an object for JSON; bytes are of one rank, `need` is of host and GPU."""
    result = {
        "model": plan.model.title,
        "parameters": plan.model.numel,
        "setup": asdict(plan.setup),
        "hardware": asdict(plan.hardware),
        "memory": [asdict(row) for row in rows_of(plan.model, plan.setup)],
    }
    steps = steps_of(plan.model, plan.setup, plan.hardware)
    for name, one, step in zip(("fp32_adam", "zero8"), plan.setup.twins, steps, strict=True):
        result[name] = {"need": asdict(needs(plan.model, one)), "step": asdict(step)}
    if plan.there is not None:
        result["limits"] = asdict(plan.there)
        result["cases"] = [
            {"what": what, **asdict(need), "fits": need.fits(plan.there)}
            for what, need in cases_of(plan.model, plan.setup, plan.there)
        ]
    return result


def text(plan: Plan) -> str:
    """Return the plan as a table with its assumptions, and the verdict if there are limits."""
    lines = [*_memory_lines(plan), *_step_lines(plan)]
    align, headers = ["left", "right", "right"], ["", *(one.optimizer for one in plan.setup.twins)]
    table = tabulate(lines, headers, disable_numparse=True, colalign=align)
    parts = [f"{plan.model.title}\n{plan.setup.describe()}", table, "\n".join(_remarks(plan))]
    return "\n\n".join(parts if plan.there is None else [*parts, _verdict(plan)])


def _memory_lines(plan: Plan) -> list[list[str]]:
    rows, ranks, lines = rows_of(plan.model, plan.setup), plan.setup.ranks_here, []
    for place, title, scale in (
        (GPU, "each GPU, GiB", 1),
        (HOST, f"each host ({counted(ranks, 'rank')}), GiB", ranks),
        (NVME, "NVMe of each host, GiB", ranks),
    ):
        here = [row for row in rows if row.place == place]
        values = [(title, *total(rows, place))] * bool(here)
        values += [(f"- {row.what}", row.fp32_bytes, row.zero8_bytes) for row in here]
        lines += [[name, _gib(scale * fp32), _gib(scale * ours)] for name, fp32, ours in values]
    return lines


def _step_lines(plan: Plan) -> list[list[str]]:
    each = steps_of(plan.model, plan.setup, plan.hardware)
    ranks = plan.setup.ranks_here
    place, scale = ("GPU", 1) if plan.setup.offload == "none" else ("host", ranks)
    lines = [
        [f"step, memory of each {place}, GiB", *(_gib(scale * s.memory_bytes) for s in each)],
        ["step, GPU link, both ways, GiB", *(_gib(s.link_bytes) for s in each)],
        ["step, NVMe of each host, each way, GiB", *(_gib(ranks * s.nvme_bytes) for s in each)],
    ]
    lines = [line for line in lines if set(line[1:]) != {_gib(0)}]
    if each[0].seconds is not None:
        lines.append(["optimizer step, ms", *(f"{1e3 * s.seconds:,.1f}" for s in each)])
        lines.append(["- limited by", *(s.limit for s in each)])
    return lines


def _remarks(plan: Plan) -> Iterator[str]:
    setup, hardware = plan.setup, plan.hardware
    yield "Not counted: activations, and what CUDA and allocators add."
    if any(row.what == ROUNDING for row in rows_of(plan.model, setup)):
        remedy = variable_of(REMEDY_MIB)
        yield f"torch does not round up large page-locked tensors with {remedy} (torch 2.13)."
    if steps_of(*plan[:3])[0].seconds is None:
        yield "Step time: not estimated on GPUs, for Muon and for INT8 weights."
    else:
        fp32_ns, zero8_ns = map(hardware.core_ns_of, setup.twins)
        cores = counted(hardware.cores, "core")
        yield f"Step time: for hosts of {cores} and {hardware.gb_per_s:g} GB/s."
        yield (
            f"One core takes {fp32_ns:.2f} ns/param for fp32 Adam, {zero8_ns:.2f} for zero8 "
            f"({'--core-ns' if hardware.core_ns else RECORD})."
        )
        if (setup.engine, setup.stage) == ("deepspeed", 3):
            yield (
                "step_in_forward hides it behind the next forward, except for the first sub-group "
                "and what is longer than the forward."
            )


def _verdict(plan: Plan) -> str:
    rows = [
        [
            _gib(need.host_bytes),
            _gib(need.gpu_bytes),
            "yes" if need.fits(plan.there) else "NO",
            what,
        ]
        for what, need in cases_of(plan.model, plan.setup, plan.there)
    ]
    limits = {"each host, GiB": plan.there.host_bytes, "each GPU, GiB": plan.there.gpu_bytes}
    headers = [f"{k}, of {v / GIB:g}" if v is not None else k for k, v in limits.items()]
    align = [*["right"] * 3, "left"]
    return tabulate(rows, [*headers, "fits", "plan"], disable_numparse=True, colalign=align)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"
