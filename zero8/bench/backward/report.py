# SPDX-License-Identifier: Apache-2.0
"""The result of steps in the backward as a markdown table."""

from zero8.bench.record import check_lines, table_lines
from zero8.bench.step.report import header_lines

REMARK = (
    "Here the backward runs on the CPU and keeps all of its cores busy, so steps cannot overlap "
    "with it: CPU times with steps in the backward and without should be about equal, and the gain "
    "is the memory of gradients. Wall times are less reliable: on a machine with other load, a "
    "loop with more threads gets more of the cores. If malloc returns freed gradients to the "
    "system, as glibc's does by default, page faults slow a plain loop down, which has nothing to "
    "do with the order of steps: large MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ avoid "
    "them for every loop. With the backward on a GPU and the step on the CPU (FSDP2 with CPU "
    "offload) the CPU is free for steps meanwhile; this record does not cover that."
)

HEADERS = (
    "loop",
    "gradients alive, MiB, most",
    "median",
    "`step()`, ms",
    "10 to 90 %",
    "iteration, ms",
    "10 to 90 %",
    "CPU, ms",
    "page faults",
    "waited",
)


def markdown(result: dict) -> str:
    """Return the table of a result."""
    size = f"{result['params']:,} parameters, {result['threads']} threads"
    lines = [
        f"# Steps in the backward on the CPU, {size}",
        "",
        *_header(result),
        "",
        *table_lines(list(HEADERS), [_cells(row) for row in result["rows"]]),
        "",
        f"{result['layers']} linear layers of {result['hidden']} x {result['hidden']}, fp32, "
        f"batches of {result['batch']} rows. Medians of {result['steps']} iterations, all loops in "
        "turns in one process; torch's is AdamW with `fused=True`. Live gradients are counted "
        "whenever one arrives: the most in any iteration, and the median of the iterations' "
        "peaks. `step()` is the wall time of that call alone, an iteration is forward, backward "
        "and step, `CPU` is the CPU time of all its threads. `waited` is the share of the threads' "
        "time that they were ready to run without a core, including threads of one loop that "
        "compete with each other. Both loops of zero8 ended with equal bits of all weights.",
        "",
        result["remark"],
        "",
        *check_lines(result["checks"]),
    ]
    return "\n".join(lines) + "\n"


def _header(result: dict) -> list[str]:
    machine = result["machine"]
    openmp = ", ".join(f"{name}={value}" for name, value in machine["openmp"].items())
    return header_lines(result, f"{machine['cores']} cores", openmp)


def _cells(row: dict) -> list[str]:
    return [
        row["name"],
        f"{row['peak_gradient_bytes'] / 2**20:.1f}",
        f"{row['peak_gradient_bytes_median'] / 2**20:.1f}",
        *_time_cells(row, "step"),
        *_time_cells(row, "iteration"),
        f"{row['cpu_ms']:.1f}",
        f"{row['page_faults']:.0f}",
        f"{row['waited_share']:.1%}",
    ]


def _time_cells(row: dict, what: str) -> tuple[str, str]:
    spread = f"{row[f'{what}_ms_p10']:.1f} to {row[f'{what}_ms_p90']:.1f}"
    return f"{row[f'{what}_ms']:.1f}", spread
