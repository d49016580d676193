# SPDX-License-Identifier: Apache-2.0
"""The step result as a markdown table."""

import statistics
from collections.abc import Callable

from benchmarks.record import table_lines

MOST_WAITED = 0.02
"""Share of the threads' time; above it, waiting for other processes distorts the measurement."""

NOTES = {
    False: "Medians of wall time of `step()`, all in turns. `waited` is the share of the threads' "
    "time that they waited for a core.",
    True: "Medians of times between CUDA events around `step()`, all in turns. The GPU sleeps "
    "until the host has launched everything, so they exclude the host's time, `host us`.",
}
"""By whether the steps are a GPU's."""

Column = tuple[str, Callable[[dict], str]]


def title(result: dict) -> str:
    """Return the title of a result's table."""
    threads = f"{result['threads']} thread(s)"
    return f"Optimizer steps, {result['numel']:,} parameters, {result['isa']}, {threads}"


def markdown(result: dict) -> list[str]:
    """Return the lines of a result's table."""
    gpu = result["gpu"]
    columns = _columns(gpu is not None)
    cells = [[cell(row) for _, cell in columns] for row in result["rows"]]
    return [
        *([f"{gpu['gpu']}, driver {gpu['driver']}, CUDA {gpu['cuda']}.", ""] if gpu else []),
        *busy_lines(result),
        *table_lines([header for header, _ in columns], cells),
        "",
        f"{NOTES[gpu is not None]} A copy reads and writes the arrays of a step without computing; "
        "`of its copy` is the copy's time over the step's. `bytes/param` are read or written: the "
        "gradient once, parameters and states twice, without scales of blocks (0.05 to 0.3 bytes).",
        *_smaller(result),
        *(f"Skipped {name}: {reason}" for name, reason in result["skipped"].items()),
    ]


def busy_lines(result: dict) -> list[str]:
    """Return a warning if other processes used the cores."""
    share = statistics.median(row["waited_share"] for row in result["rows"])
    if share <= MOST_WAITED:
        return []
    return [
        f"**The machine was busy: threads waited for a core for {share:.1%} of their time. Measure "
        "again when it is idle.**",
        "",
    ]


def _columns(on_gpu: bool) -> list[Column]:
    form = "{:.4f}" if on_gpu else "{:.3f}"
    columns: list[Column] = [
        ("step", _label),
        ("ns/param", _number("ns_per_param", form)),
        ("10 %", _number("ns_per_param_p10", form)),
        ("90 %", _number("ns_per_param_p90", form)),
        ("bytes/param", _number("bytes_per_param", "{:g}")),
        ("GB/s", _number("gb_per_s", "{:.1f}")),
        ("of its copy", _number("of_copy", "{:.2f}")),
    ]
    if on_gpu:
        return [*columns, ("host us", _number("host_us", "{:.0f}"))]
    return [
        *columns,
        ("speed over DeepSpeed fp32", _number("speed_over_deepspeed_fp32", "{:.2f}")),
        ("extra bytes", _number("extra_bytes", "{:,}")),
        ("waited", _number("waited_share", "{:.1%}")),
    ]


def _number(key: str, form: str) -> Callable[[dict], str]:
    return lambda row: "-" if row[key] is None else form.format(row[key])


def _label(row: dict) -> str:
    codec = f"`{row['codec']}`" if row["codec"] else None
    return " ".join(filter(None, (row["name"], row["algorithm"], row["variant"], codec)))


def _smaller(result: dict) -> list[str]:
    smaller = {row["name"]: row["numel"] for row in result["rows"]}
    return [
        f"{name} is timed on {numel:,} parameters."
        for name, numel in smaller.items()
        if numel < result["numel"]
    ]
