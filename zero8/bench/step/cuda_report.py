# SPDX-License-Identifier: Apache-2.0
"""The result of steps on a GPU as markdown tables."""

from zero8.bench.record import check_lines, skipped_lines, table_lines
from zero8.bench.step.cuda_contenders import size_name
from zero8.bench.step.report import time_columns

TIMES = time_columns(".4f", ".0f")
HOST = ("host us", lambda row: f"{row['host_us']:.0f}")
COLUMNS = (*TIMES, ("of its copy", lambda row: f"{row['fraction_of_copy']:.2f}"), HOST)
LIST_COLUMNS = (*TIMES, ("over one tensor", lambda row: f"{row['ratio']:.2f}"), HOST)

NOTES = (
    "Medians of times between CUDA events around `step()`, all in turns in one process. Before "
    "each the GPU is kept waiting until the host has asked for everything: the host's own time, "
    "`host us`, is not in them. `bytes/param` are read or written: the gradient once, parameters "
    "and states twice; scales of blocks (0.05 to 0.3 bytes) are not counted. `of its copy` is the"
    " time of a copy over the step's: `Tensor.copy_` within GPU memory, which reads half as many "
    "bytes as the step reads and writes together, and writes the other half. The smallest sizes "
    "lie in the GPU's cache, and events tell half a microsecond."
)


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    lines = [f"# Optimizer steps on {result['machine']['gpu']}", "", _header(result), "", NOTES]
    lines += [f"\n**FAILED {error}**" for error in result["errors"]]
    for numel in dict.fromkeys(row["numel"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["numel"] == numel]
        lines += ["", f"## {size_name(numel)} parameters", "", *_table(COLUMNS, rows)]
    if result["tensor_list"]:
        (tensors,), (numel,) = (
            {row[key] for row in result["tensor_list"]} for key in ("tensors", "numel")
        )
        lines += ["", f"## {tensors} tensors of a model, {size_name(numel)} parameters together"]
        lines += ["", *_table(LIST_COLUMNS, result["tensor_list"])]
    if result["checks"]:
        lines += ["", "## Targets", "", *check_lines(result["checks"])]
    return "\n".join([*lines, *skipped_lines(result["skipped"])]) + "\n"


def _table(columns: tuple, rows: list[dict]) -> list[str]:
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return table_lines([header for header, _ in columns], cells)


def _header(result: dict) -> str:
    machine = result["machine"]
    parts = [
        f"`{result['command']}`, {result['seconds']:.0f} s, commit {result['commit'] or 'unknown'}",
        f"{machine['gpu']} of compute capability {machine['compute_capability']}, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['multiprocessors']} multiprocessors",
        f"driver {machine['driver'] or 'unknown'}, CUDA {machine['cuda']}",
        result["cpu"],
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
    ]
    return "; ".join(parts) + "."
