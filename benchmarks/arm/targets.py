# SPDX-License-Identifier: Apache-2.0
"""How many of AVX2's cycles NEON may take: both by a model of a processor."""

from collections.abc import Iterable

MOST_OF_AVX2 = 2.2
"""NEON's cycles per parameter over AVX2's: it has half of the lanes."""
AVX2_MODEL = "znver4"


def cycles(result: dict, case: tuple[str, str], target: str, model: str, part: str) -> float:
    """Return modelled cycles per parameter of a part of the step; `case`: codec and variant."""
    (row,) = (
        row
        for row in result["loops"]
        if (row["codec"], row["variant"]) == case
        and (row["target"], row["model"], row["part"]) == (target, model, part)
    )
    return row["cycles_per_param"]


def cases(result: dict) -> list[tuple[str, str]]:
    """Return the codecs and variants of a result, in order."""
    return list(dict.fromkeys((row["codec"], row["variant"]) for row in result["traced"]))


def models_of(result: dict, target: str) -> list[str]:
    """Return the models of a target, in order."""
    return list(dict.fromkeys(row["model"] for row in result["loops"] if row["target"] == target))


def ratios(result: dict, model: str) -> Iterable[tuple[tuple[str, str], float]]:
    """Yield for each case how many times AVX2's cycles a model takes for a whole block."""
    for case in cases(result):
        avx2 = cycles(result, case, "avx2", AVX2_MODEL, "block")
        yield case, cycles(result, case, "neon", model, "block") / avx2


def checks(result: dict) -> list[dict]:
    """Return a check per codec, variant and model of an ARM processor."""
    return [
        {
            "target": f"{codec}, {variant}: cycles of NEON on {model} over AVX2's on {AVX2_MODEL}",
            "value": ratio,
            "limit": MOST_OF_AVX2,
            "met": ratio <= MOST_OF_AVX2,
        }
        for model in models_of(result, "neon")
        for (codec, variant), ratio in ratios(result, model)
    ]
