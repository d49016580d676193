# SPDX-License-Identifier: Apache-2.0
"""The step result as markdown tables."""

import statistics
from collections.abc import Callable

from zero8.bench.record import check_lines, skipped_lines, table_lines
from zero8.bench.step import machines

# Share of the threads' time; above it, waiting for other processes distorts the measurement.
MOST_WAITED = 0.02

Column = tuple[str, Callable[[dict], str]]


def time_columns(ns: str, rate: str) -> tuple[Column, ...]:
    """Return the columns of a step and its time, with formats of times and rates."""
    spread = f"{{ns_per_param_p10:{ns}}} to {{ns_per_param_p90:{ns}}}"
    return (
        ("step", label),
        ("ns/param", f"{{ns_per_param:{ns}}}".format_map),
        ("10 to 90 %", spread.format_map),
        ("bytes/param", "{bytes_per_param:g}".format_map),
        ("GB/s", f"{{gb_per_s:{rate}}}".format_map),
    )


def label(row: dict) -> str:
    """Return the name of a step's row."""
    codec = f"`{row['codec']}`" if row["codec"] else None
    return " ".join(filter(None, (row["name"], row["algorithm"], row["variant"], codec)))


def optional(value: float | None, form: str, unit: float = 1) -> str:
    """Return a number in its unit, or a dash for None."""
    return "-" if value is None else form.format(value / unit)


OF_STREAM = ("of its stream", lambda row: f"{row['fraction_of_stream']:.2f}")
COLUMNS = (
    *time_columns(".3f", ".1f"),
    OF_STREAM,
    ("speed over DeepSpeed fp32", lambda row: optional(row["ratio_vs_deepspeed_fp32"], "{:.2f}")),
    ("extra KiB", lambda row: optional(row["extra_bytes"], "{:.0f}", 2**10)),
    ("waited", lambda row: f"{row['waited_share']:.1%}"),
)
GPU_COLUMNS = (
    *time_columns(".4f", ".0f"),
    OF_STREAM,
    ("host us", lambda row: f"{row['host_us']:.0f}"),
)
NOTES = (
    "Medians of wall time of `step()`, all in turns in one process. A copy reads and writes the "
    "arrays of a step without computing; `of its stream` is the copy's time over the step's. "
    "Speeds are relative to DeepSpeed's fp32 step of the same algorithm. "
    "`waited` is the share of the threads' time that they waited for a core."
)
GPU_NOTES = (
    "Medians of times between CUDA events around `step()`, all in turns in one process. The GPU "
    "sleeps until the host has launched everything, so they exclude the host's time, `host us`. "
    "`bytes/param` are read or written: the gradient once, parameters and states twice, without "
    "scales of blocks (0.05 to 0.3 bytes). `of its stream` is the time of a copy over the step's: "
    "`Tensor.copy_` within GPU memory, which reads and writes as many bytes in total."
)


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    on_gpu = "gpu" in result["machine"]
    columns, notes = (GPU_COLUMNS, GPU_NOTES) if on_gpu else (COLUMNS, NOTES)
    cells = [[cell(row) for _, cell in columns] for row in result["rows"]]
    lines = [
        f"# Optimizer steps on {'a GPU' if on_gpu else 'the CPU'}, {result['numel']:,} "
        f"parameters, {where(result)}",
        "",
        *_header(result),
        "",
        *table_lines([header for header, _ in columns], cells),
        "",
        notes,
        *_smaller(result["rows"], result["numel"]),
        *([] if on_gpu else _cpu_lines(result)),
        "",
        "## Tensors of a model",
        "",
        _list_line(result["tensor_list"]),
        "",
        "## Targets",
        "",
        *check_lines(result["checks"]),
        *skipped_lines(result["skipped"]),
    ]
    return "\n".join(lines) + "\n"


def where(result: dict) -> str:
    """Return the name of the GPU, or the number of threads."""
    if "gpu" in result["machine"]:
        return result["machine"]["gpu"]["gpu"]
    return f"{result['threads']} thread" + "s" * (result["threads"] > 1)


def _cpu_lines(result: dict) -> list[str]:
    """Return the sections on the speed of one core and on other machines."""
    return [
        "",
        "## In the cache, one thread, ns/param of CPU time",
        "",
        *_cached_lines(result["in_cache"]),
        "",
        "## On other machines",
        "",
        *_machine_lines(result),
    ]


def _header(result: dict) -> list[str]:
    machine = result["machine"]
    if "gpu" in machine:
        return header_lines(result, *_gpu(machine["gpu"]))
    pages = (
        f"pages of {machine['page_bytes']} bytes, {_mib(machine['anonymous_huge_bytes'])} in huge "
        f"pages (`{machine['transparent_huge_pages'] or 'unknown'}`)"
    )
    return header_lines(
        result, f"last-level cache of {_mib(machine['last_level_cache_bytes'])}", pages
    )


def _gpu(gpu: dict) -> tuple[str, str]:
    """Describe a GPU, and its software."""
    return (
        f"{gpu['gpu']} of compute capability {gpu['compute_capability']}, "
        f"{gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['multiprocessors']} multiprocessors",
        f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}",
    )


def header_lines(result: dict, processor: str, more: str) -> list[str]:
    """Return a result's command, machine and versions, and whether the machine was busy.

    Args:
        result: the result.
        processor: a description of the processor besides its name.
        more: a further description of the machine; may be empty.
    """
    parts = [
        f"`{result['command']}`, {result['seconds']:.0f} s, commit {result['commit'] or 'unknown'}",
        f"{result['cpu']}, {processor}",
        f"load average before it {result['machine']['load_average']:.2f}",
        more,
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    line = "; ".join(filter(None, parts)) + "."
    return [line, *(f"\n**{busy}**" for busy in busy_lines(result))]


def _mib(value: int | None) -> str:
    return optional(value, "{:.0f} MiB", 2**20)


def busy_lines(result: dict) -> list[str]:
    """Return a warning if other processes used the cores."""
    share = statistics.median(row["waited_share"] for row in result["rows"])
    if share <= MOST_WAITED:
        return []
    return [
        f"The machine was busy: threads waited for a core for {share:.1%} of their time. Measure "
        "again when it is idle."
    ]


def _smaller(rows: list[dict], numel: int) -> list[str]:
    smaller = {row["name"]: row["numel"] for row in rows if row["numel"] < numel}
    return [f"{name} is timed on {size:,} parameters." for name, size in smaller.items()]


def _cached_lines(rows: list[dict]) -> list[str]:
    isas = list(dict.fromkeys(row["isa"] for row in rows))
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        step = f"{row['algorithm']} {row['variant']} `{row['codec']}`"
        times.setdefault(step, {})[row["isa"]] = row["ns_per_param"]
    cells = [[step, *(f"{ns[isa]:.3f}" for isa in isas)] for step, ns in times.items()]
    return table_lines(["step", *isas], cells)


def _machine_lines(result: dict) -> list[str]:
    on = machines.machines(result)
    titles = [f"{one.name}: {one.cores} cores, {one.gb_per_s:.0f} GB/s" for one in on]
    cells = [
        [
            label(row),
            f"{row['ns_in_cache']:.3f}",
            *(f"{one['ns_per_param']:.3f}, {one['saturating_cores']:.1f}" for one in row["on"]),
        ]
        for row in machines.rows(result)
    ]
    return [
        *table_lines(["step", "one core in the cache, ns/param", *titles], cells),
        "",
        "The first number is the least ns/param with cores like these: the larger of one core's "
        "time over the number of cores, and bytes over bandwidth. The second is the number of "
        "cores that saturate the memory; more do not help.",
    ]


def _list_line(listed: dict) -> str:
    return (
        f"{listed['tensors']} tensors, {listed['numel']:,} elements together, "
        f"{listed['algorithm']} fp32 `{listed['codec']}`: {listed['ns_per_param']:.3f} ns/param, "
        f"{listed['ratio']:.2f} times the time of one tensor of as many elements."
    )
