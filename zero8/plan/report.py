# SPDX-License-Identifier: Apache-2.0
"""The plan as a table and as one JSON object."""

import math
import textwrap
from dataclasses import asdict

from tabulate import tabulate

from zero8.plan.fit import Verdict
from zero8.plan.groups import matrices_in
from zero8.plan.matrices import multiplied
from zero8.plan.memory import GPU, HOST, NVME, Row, rows_of, total
from zero8.plan.model import Model
from zero8.plan.setup import Setup, counted
from zero8.plan.share import is_linear
from zero8.plan.step_time import Hardware, step_times
from zero8.plan.traffic import traffic_of

GIB = 2**30

PLAN_COLUMNS = 62
"""The width of the verdict's last column, such that its table has at most 120 columns."""


def summary(model: Model, setup: Setup, hardware: Hardware, found: Verdict | None) -> dict:
    """Return the plan as an object for JSON; bytes are of one rank unless named otherwise."""
    rows, ranks = rows_of(model, setup), setup.ranks_here
    totals = {place: total(rows, place) for place in (GPU, HOST, NVME)}
    result = {
        "model": model.title,
        "parameters": model.numel,
        "setup": asdict(setup),
        "hardware": asdict(hardware),
        "memory": [asdict(row) for row in rows],
    }
    if found is not None:
        result["limits"] = asdict(found.limits)
        for name, need in (("fp32_adam", found.fp32_adam), ("zero8", found.zero8)):
            result.setdefault("fits", {})[name] = need.fits(found.limits)
        result["changes_that_fit"] = [asdict(change) for change in found.changes]
    times = step_times(model, setup, hardware) or (None, None)
    for number, name in enumerate(("fp32_adam", "zero8")):
        step = times[number]
        result[name] = {
            "gpu_bytes": totals[GPU][number],
            "host_bytes": ranks * totals[HOST][number],
            "nvme_bytes_of_host": ranks * totals[NVME][number],
            "traffic": asdict(traffic_of(model, setup)[number]),
            "step": None if step is None else asdict(step),
        }
    if setup.algorithm.is_of_matrices:
        names = ("fp32_adam", "zero8")
        result["flop_per_rank"] = dict(zip(names, multiplied(model, setup), strict=True))
    return result


def text(model: Model, setup: Setup, hardware: Hardware, found: Verdict | None) -> str:
    """Return the plan as a table with its assumptions, and the verdict if there is one."""
    lines = [
        *_memory_lines(rows_of(model, setup), setup.ranks_here),
        *_traffic_lines(model, setup),
        *_time_lines(model, setup, hardware),
    ]
    align, headers = ["left", "right", "right"], ["", *setup.optimizers]
    table = tabulate(lines, headers, disable_numparse=True, colalign=align)
    verdict = [] if found is None else ["", *_verdict_lines(found, setup.optimizers)]
    below = _remarks(model, setup, hardware) + verdict
    return "\n".join([model.title, setup.describe(), "", table, "", *below])


def _memory_lines(rows: list[Row], ranks: int) -> list[list[str]]:
    lines = []
    for place, title, scale in (
        (GPU, "each GPU, GiB", 1),
        (HOST, f"each host ({counted(ranks, 'rank')}), GiB", ranks),
        (NVME, "NVMe of each host, GiB", ranks),
    ):
        here = [row for row in rows if row.place == place]
        if here:
            lines.append([title, *(_in_gib(scale * value) for value in total(rows, place))])
        for row in here:
            values = (row.fp32_bytes, row.zero8_bytes)
            lines.append([f"- {row.what}", *(_in_gib(scale * value) for value in values)])
    return lines


def _traffic_lines(model: Model, setup: Setup) -> list[list[str]]:
    ranks, place = setup.ranks_here, "each GPU" if setup.offload == "none" else "each host"
    scale = 1 if setup.offload == "none" else ranks
    each = traffic_of(model, setup)
    lines = [
        (f"step, memory of {place}, GiB", [scale * one.step_bytes for one in each]),
        ("around it, memory of each host, GiB", [scale * one.passes_bytes for one in each]),
        ("step, GPU link, both ways, GiB", [one.link_bytes for one in each]),
        ("step, NVMe of each host, read, GiB", [ranks * one.nvme_read_bytes for one in each]),
        ("step, NVMe of each host, written, GiB", [ranks * one.nvme_write_bytes for one in each]),
        ("sent by each rank, GiB", [one.network_bytes for one in each]),
    ]
    return [[name, *map(_in_gib, values)] for name, values in lines if any(values)]


def _time_lines(model: Model, setup: Setup, hardware: Hardware) -> list[list[str]]:
    times = step_times(model, setup, hardware)
    if setup.has_int8_weights:
        return []
    if times is None:
        flop = (f"{one / 1e12:,.2f}" for one in multiplied(model, setup))
        return [["products of matrices, TFLOP of each rank", *flop]]
    lines = [
        ["optimizer step, ms", *(f"{1e3 * one.seconds:,.1f}" for one in times)],
        ["- limited by", *(one.limit for one in times)],
    ]
    if setup.offload != "none":
        cores = [f"{one.saturating_cores:.1f}" for one in times]
        lines.append(["- cores that saturate the memory", *cores])
        what = "clipping and step, ms" if setup.engine == "fsdp2" else "engine.step(), ms"
        lines.append([what, *(f"{1e3 * one.phase_seconds:,.1f}" for one in times)])
    return lines


def _remarks(model: Model, setup: Setup, hardware: Hardware) -> list[str]:
    lines = ["Not counted: activations, and what CUDA and allocators add."]
    if setup.algorithm.is_of_matrices:
        numel = sum(map(math.prod, matrices_in(model, setup)))
        return [
            *lines,
            "Nor are matrices as they are orthogonalized, and on their way to a GPU and back.",
            f"Muon steps {100 * numel / model.numel:.1f} % of the parameters, AdamW those of one "
            "dimension",
            f"and those called {', '.join(setup.adam_params) or 'nothing'} (adam_params).",
            "Step time: not estimated, as products of matrices take most of it.",
        ]
    if setup.has_int8_weights:
        numel = sum(math.prod(param[1]) for param in model.params if is_linear(param))
        return [
            *lines,
            "Nor are the float32 rows that a step of INT8 weights decodes.",
            f"INT8 weights: {100 * numel / model.numel:.1f} % of the parameters, the matrices "
            "without `embed` in their names.",
            "Step time: not estimated, as the time of decoding and rounding is not known.",
        ]
    if setup.offload == "none":
        gpu = f"{hardware.gpu_gb_per_s:g} GB/s (--gpu-bandwidth)"
        return [*lines, f"Step time: the bytes over a GPU's {gpu}; a real step takes longer."]
    rates = hardware.rates
    lines += [
        f"Step time: for hosts of {counted(hardware.host.cores, 'core')} and "
        f"{hardware.host.gb_per_s:.0f} GB/s (--cores, --bandwidth, or --measure).",
        f"One core takes {rates.fp32_adam:.2f} ns/param for fp32 Adam, {rates.zero8:.2f} for "
        f"zero8, {rates.zero8_bf16:.2f} without fp32 masters",
        f"({rates.source}).",
        "Around the step: clipping, and 16-bit weights on their way to the model.",
    ]
    if setup.offload == "nvme":
        lines.append(f"NVMe: {hardware.nvme_gb_per_s:g} GB/s of each host (--nvme-bandwidth).")
    return lines


def _verdict_lines(found: Verdict, optimizers: tuple[str, str]) -> list[str]:
    limits, rows = found.limits, []
    fp32, zero8 = optimizers
    cases = [(fp32, found.fp32_adam), (zero8, found.zero8)]
    cases += [(f"{zero8}, {change.what}", change.need) for change in found.changes]
    for what, need in cases:
        fits = "yes" if need.fits(limits) else "NO"
        lines = textwrap.fill(what, PLAN_COLUMNS, break_on_hyphens=False)
        rows.append([_in_gib(need.host_bytes), _in_gib(need.gpu_bytes), fits, lines])
    headers = [_limit("host", limits.host_bytes), _limit("GPU", limits.gpu_bytes), "fits", "plan"]
    align = [*["right"] * 3, "left"]
    lines = tabulate(rows, headers, disable_numparse=True, colalign=align).splitlines()
    if not found.zero8.fits(limits) and not found.changes:
        lines.append("None of the changes tried makes zero8 fit.")
    return lines


def _limit(name: str, num_bytes: int | None) -> str:
    return f"each {name}, GiB" + (f", of {num_bytes / GIB:g}" if num_bytes is not None else "")


def _in_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"
