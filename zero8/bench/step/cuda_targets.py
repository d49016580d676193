# SPDX-License-Identifier: Apache-2.0
"""What the steps on a GPU are held to, and whether a result meets it.

Only sizes that no cache holds count, the worst of them; all are ratios of medians of one run.
"""

from zero8.bench.step.targets import at_least
from zero8.bench.step.variants import BF16, CUDA_VARIANTS, FP32

LARGE_NUMEL = 2**26
FRACTION_OF_COPY = 0.85
# Speed of the default codec over others' steps on the same parameters.
SPEED_OVER = {
    ("bitsandbytes", FP32.name): 1.4,
    ("bitsandbytes", BF16.name): 1.4,
    ("torch", FP32.name): 1.5,
}


def checks(result: dict) -> list[dict]:
    """Return, for every target whose rows were measured: value, limit, and whether it is met."""
    rows = [row for row in result["rows"] if row["numel"] >= LARGE_NUMEL]
    if not rows:
        return []
    default = result["default"]
    ours = {
        v.name: {r["numel"]: r for r in rows if _key(r) == ("zero8", v.name, default)}
        for v in CUDA_VARIANTS
    }
    measured = {name: by_numel for name, by_numel in ours.items() if by_numel}
    found = [at_least("pairs of dtypes measured", len(measured), len(CUDA_VARIANTS))]
    for name, by_numel in measured.items():
        fraction = min(row["fraction_of_copy"] for row in by_numel.values())
        target = f"zero8 {name} `{default}` (default), bandwidth over a copy's"
        found.append(at_least(target, fraction, FRACTION_OF_COPY))
    for (peer, name), limit in SPEED_OVER.items():
        ratios = [
            row["ns_per_param"] / ours[name][row["numel"]]["ns_per_param"]
            for row in rows
            if _key(row) == (peer, name, None) and row["numel"] in ours[name]
        ]
        if ratios:
            target = f"zero8 {name} `{default}` (default), speed over {peer}'s"
            found.append(at_least(target, min(ratios), limit))
    return found


def _key(row: dict) -> tuple[str, str, str | None]:
    return row["name"], row["variant"], row["codec"]
