# SPDX-License-Identifier: Apache-2.0
"""The result of whole engines as a markdown table."""

from zero8.algorithms.adam import ADAM
from zero8.algorithms.muon import MUON
from zero8.bench.engine.contenders import DEEPSPEED_MUON, OUR_MUON
from zero8.bench.engine.engines import SIDES, ZERO_STAGES
from zero8.bench.record import check_lines, table_lines
from zero8.bench.step.targets import at_least, at_most

HEADERS = (
    "engine, clipping, optimizer",
    "the engine's step, ms",
    "10 to 90 %",
    "optimizer's step, ms",
    "bytes/param",
    "the rest, ms",
    "bytes/param",
    "sent, bytes/param",
    "times as fast",
)
# The least ratios, by row.
LIMITS = {
    "zero8, fp32 masters": 2.0,
    "zero8, 24-bit masters": 2.5,
    "zero8, bf16 masters": 1.5,
    "zero8": 1.5,
}
# The most that Muon sends in ZeRO-1 and 2, of what DeepSpeed's does; the weights that ranks gather
# are included.  In ZeRO-3, where every matrix is cut, it is 2 / ranks.
SENT_LIMIT = 0.25

REMARKS = {
    ADAM.name: (
        "Under ZeRO, bf16 masters are compared with DeepSpeed's bf16 masters and states, all "
        "others with its fp32 masters; under FSDP2, whose parameters are float32, with torch's "
        "fused AdamW. zero8 clips by `optimizer.clip_grad_norm_` under FSDP2. Bytes are those that "
        "a machine without a GPU reads and writes (`zero8/bench/engine/traffic.py`), besides what "
        "ranks exchange."
    ),
    MUON.name: (
        "All are compared with DeepSpeed's Muon, which orthogonalizes before its optimizer's step: "
        "in float16 where the processor has it, and else in float32. zero8's does it in the step: "
        "in bfloat16 where the processor multiplies it fast, and else in float32, as the row "
        "*float32* does everywhere."
    ),
}


def checks(rows: list[dict]) -> list[dict]:
    """Return whether phases with clipping, and the bytes that Muon sends, meet their targets."""
    found = [
        at_least(f"{row['engine']}, clipped: {row['name']}", row["ratio"], LIMITS[row["name"]])
        for row in rows
        if row["clipping"] and row["name"] in LIMITS
    ]
    sent = {
        (kind_of(row), row["name"]): row["sent_bytes"]
        for row in rows
        if ZERO_STAGES.get(row["engine"]) in (1, 2)
    }
    for kind, name in sent:
        if name == OUR_MUON and (theirs := sent[kind, DEEPSPEED_MUON]):
            what = f"{kind}: bytes sent over those of {DEEPSPEED_MUON}"
            found.append(at_most(what, sent[kind, name] / theirs, SENT_LIMIT))
    return found


def markdown(result: dict) -> str:
    """Return the table of a result."""
    machine, side = result["machine"], SIDES[result["algorithm"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"# Whole engines, {result['algorithm']}, {result['numel']:,} parameters, "
        f"{result['threads']} threads",
        "",
        f"`{result['command']}`, {result['seconds']:.0f} s, commit "
        f"{result['commit'] or 'unknown'}; {result['cpu']}, {machine['cores']} cores, instruction "
        f"set {result['isa']}; load average before it {machine['load_average']:.2f}; {versions}.",
        "",
        *table_lines(list(HEADERS), [_cells(row) for row in result["rows"]]),
        "",
        f"A bf16 model of matrices of {side} x {side} on {result['world_size']} rank(s), its "
        "optimizer in host memory; rank 0's times. Medians of "
        f"{result['rounds']} steps; the engines of one kind step in turns in one process, and a "
        f"ratio is the median over the rounds. {REMARKS[result['algorithm']]} The engine's step is "
        "everything from the last gradient to the next forward: `engine.step()`, or clipping and "
        "the optimizer's step. Sent are the bytes of rank 0 in a step, counted "
        "(`zero8/bench/engine/sent.py`).",
        "",
        *check_lines(result["checks"]),
    ]
    return "\n".join(lines) + "\n"


def kind_of(row: dict) -> str:
    """Return the engine and the clipping of a row, in words."""
    clipping = f"clipped at {row['clipping']:g}" if row["clipping"] else "not clipped"
    return f"{row['engine']}, {clipping}"


def _cells(row: dict) -> list[str]:
    return [
        f"{kind_of(row)}, {row['name']}",
        f"{row['phase_ms']:.1f}",
        f"{row['phase_ms_p10']:.1f} to {row['phase_ms_p90']:.1f}",
        f"{row['inner_ms']:.1f}",
        _bytes(row, "step_bytes"),
        f"{row['phase_ms'] - row['inner_ms']:.1f}",
        _bytes(row, "rest_bytes"),
        f"{row['sent_bytes']:.3f}",
        f"{row['ratio']:.2f}",
    ]


def _bytes(row: dict, name: str) -> str:
    return f"{row[name]:.1f}" if name in row else "-"
