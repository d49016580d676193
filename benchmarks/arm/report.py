# SPDX-License-Identifier: Apache-2.0
"""The result as markdown tables."""

from benchmarks.arm.measured import ROUNDS
from benchmarks.arm.targets import AVX2_MODEL, MOST_OF_AVX2, cases, cycles, models_of, ratios
from benchmarks.fidelity.runs import title_lines
from zero8.bench.record import table_lines

LOOPS = ("square roots", "divisions")


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    lines = title_lines(result, "The step on ARM, without the hardware", f"on {result['cpu']}")
    for section in (_about_lines, _step_lines, _ratio_lines, _loop_lines):
        lines += [*section(result), ""]
    return "\n".join(lines)


def _about_lines(result: dict) -> list[str]:
    ghz = [f"{row['ghz']:.2f} GHz" for row in result["measured"]]
    clock = ghz[0] if ghz else "not measured"
    return [
        "**Modelled** is what llvm-mca computes for instructions that are repeated: "
        f"{result['llvm']}. It takes loads to hit the first-level cache and branches to be "
        "predicted. **Emulated** instructions are counted: those of a step under QEMU. "
        "**Measured** is AVX2 alone, one thread on 160 KiB (fp32) in the cache, the fastest of "
        f"{ROUNDS} medians; its cycles are times multiplied by the clock, {clock}: "
        f"{result['clock']}. "
        "No ARM processor was at hand.",
    ]


def _step_lines(result: dict) -> list[str]:
    columns = [("avx2", model) for model in models_of(result, "avx2")]
    arm = [t for t in ("neon", "baseline") if models_of(result, t)]
    columns += [(target, model) for target in arm for model in models_of(result, target)]
    counted = {
        (row["codec"], row["variant"], row["target"]): row["instructions_per_param"]
        for row in result["traced"]
    }
    times = {(row["codec"], row["variant"]): row for row in result["measured"]}
    targets = ["avx2", *arm]
    headers = ["codec", "params", *(f"instructions, {t}, emulated" for t in targets)]
    headers += [f"{model}, {target}, modelled" for target, model in columns]
    headers += ["avx2, measured", "ns, avx2, measured"]
    cells = [
        [
            *case,
            *(f"{counted[(*case, target)]:.1f}" for target in targets),
            *(f"{cycles(result, case, *column, 'block'):.2f}" for column in columns),
            *(
                f"{times[case][key]:.{digits}f}" if case in times else "-"
                for key, digits in (("cycles_per_param", 2), ("ns_per_param", 3))
            ),
        ]
        for case in cases(result)
    ]
    return [
        "## A whole step",
        "",
        "Per parameter: instructions, and cycles of a block of 256 parameters among others.",
        "",
        *table_lines(headers, cells),
    ]


def _loop_lines(result: dict) -> list[str]:
    cells = [
        [
            row["codec"],
            row["variant"],
            row["target"],
            row["part"],
            row["model"],
            f"{row['instructions']} / {row['params']}",
            f"{row['instructions'] / row['params']:.2f}",
            f"{row['cycles']:.1f}",
            f"{row['cycles_per_param']:.2f}",
            f"{row['least_cycles'] / row['params']:.2f}",
            f"{row['busiest']}, {row['busy']:.0%}",
        ]
        for row in result["loops"]
        if row["part"] in LOOPS
    ]
    headers = [
        *("codec", "params", "target", "loop of", "model", "instructions / parameters"),
        *("instructions per parameter", "cycles", "cycles per parameter", "at least"),
        "busiest unit",
    ]
    return [
        "## Its two loops",
        "",
        "All modelled, of one iteration as it is most often. `at least`: cycles per parameter that "
        "the busiest unit would take if instructions were spread as well as can be.",
        "",
        *table_lines(headers, cells),
    ]


def _ratio_lines(result: dict) -> list[str]:
    times = {(row["codec"], row["variant"]): row["cycles_per_param"] for row in result["measured"]}
    cells = [
        [
            *case,
            model,
            f"{ratio:.2f}",
            f"{cycles(result, case, 'neon', model, 'block') / times[case]:.2f}"
            if case in times
            else "-",
            "yes" if ratio <= MOST_OF_AVX2 else "**no**",
        ]
        for model in models_of(result, "neon")
        for case, ratio in ratios(result, model)
    ]
    headers = ["codec", "params", "model of NEON", f"over {AVX2_MODEL}, modelled"]
    headers += ["over AVX2, measured", f"at most {MOST_OF_AVX2} of the modelled"]
    return [
        "## NEON's cycles over AVX2's",
        "",
        "Of a whole step; NEON has half of the lanes.",
        "",
        *table_lines(headers, cells),
    ]
