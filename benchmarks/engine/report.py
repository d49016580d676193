# SPDX-License-Identifier: Apache-2.0
"""The result of whole engines as a markdown table."""

from benchmarks.engine.engines import SIDES
from benchmarks.record import table_lines
from zero8.algorithms.adam import ADAM
from zero8.algorithms.muon import MUON

HEADERS = (
    "engine, clipping, optimizer",
    "the engine's step, ms",
    "10 to 90 %",
    "optimizer's step, ms",
    "the rest, ms",
    "sent, bytes/param",
    "times as fast",
)
REMARKS = {
    ADAM.name: (
        "Under ZeRO, bf16 masters are compared with DeepSpeed's bf16 masters and states, all "
        "others with its fp32 masters; under FSDP2, whose parameters are float32, with torch's "
        "fused AdamW. zero8 clips by `optimizer.clip_grad_norm_` under FSDP2."
    ),
    MUON.name: (
        "All are compared with DeepSpeed's Muon, which orthogonalizes before its optimizer's step: "
        "in float16 where the processor has it, and else in float32. zero8's does it in the step: "
        "in bfloat16 where the processor multiplies it fast, and else in float32, as the row "
        "*float32* does everywhere."
    ),
}


def title(result: dict) -> str:
    """Return the title of a result's table."""
    sizes = f"{result['numel']:,} parameters, {result['threads']} threads, {result['isa']}"
    return f"Whole engines, {result['algorithm']}, {sizes}"


def markdown(result: dict) -> list[str]:
    """Return the lines of a result's table."""
    side = SIDES[result["algorithm"]]
    return [
        *table_lines(list(HEADERS), [_cells(row) for row in result["rows"]]),
        "",
        f"A bf16 model of matrices of {side} x {side} on {result['world_size']} rank(s), its "
        "optimizer in host memory; rank 0's times. Medians of "
        f"{result['rounds']} steps; the engines of one kind step in turns in one process, and a "
        f"ratio is the median over the rounds. {REMARKS[result['algorithm']]} The engine's step is "
        "everything from the last gradient to the next forward: `engine.step()`, or clipping and "
        "the optimizer's step. Sent are the bytes of rank 0 in a step, counted "
        "(`benchmarks/engine/sent.py`).",
    ]


def _kind(row: dict) -> str:
    """Return the engine and the clipping of a row, in words."""
    clipping = f"clipped at {row['clipping']:g}" if row["clipping"] else "not clipped"
    return f"{row['engine']}, {clipping}"


def _cells(row: dict) -> list[str]:
    return [
        f"{_kind(row)}, {row['name']}",
        f"{row['phase_ms']:.1f}",
        f"{row['phase_ms_p10']:.1f} to {row['phase_ms_p90']:.1f}",
        f"{row['inner_ms']:.1f}",
        f"{row['phase_ms'] - row['inner_ms']:.1f}",
        f"{row['sent_bytes']:.3f}",
        f"{row['ratio']:.2f}",
    ]
