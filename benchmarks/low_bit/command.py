# SPDX-License-Identifier: Apache-2.0
"""Show what rounding does to small updates, to memory and to gradients that are averaged.

Writes OUT (JSON), tables beside it (.md) and figures (OUT's name with _updates, _memory and
_gradients; .png).

Keys of the JSON object:
    versions, commit, cpu, workers, command, seconds, cpu_seconds: what was run.
    paths: a weight of bfloat16 and of INT8 under small updates, by rounding.
    distances: how far such weights end from the right path, in distances of two codes, a row per
        format, update and rounding.
    memory: bytes of a model of 8B parameters, a row per kind of weights and of optimizer states.
    averages: errors of averages over ranks of quantized gradients, a row per format and rounding.
    losses: final validation losses with such averages, a row per format and rounding.
"""

from collections.abc import Sequence

from benchmarks.fidelity import runs
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.training import Recipe
from benchmarks.low_bit.averages import averages
from benchmarks.low_bit.figures import draw
from benchmarks.low_bit.losses import BETA2, loss_jobs, loss_rows
from benchmarks.low_bit.lost import distances, paths
from benchmarks.low_bit.memory import memory
from benchmarks.low_bit.ranks import TASK
from benchmarks.low_bit.report import markdown

REPLAYED_STEPS = 200


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers)
    replay = Job(averages, (Recipe(REPLAYED_STEPS, BETA2, task=TASK),), REPLAYED_STEPS)
    results = run_jobs([replay, *loss_jobs()], workers=workers, label="low_bit")
    return {
        "paths": paths(),
        "distances": distances(),
        "memory": memory(),
        "averages": results[replay],
        "losses": loss_rows(results),
        **environment,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write all files."""
    return runs.main("benchmarks.low_bit", __doc__, measure, markdown, argv, draw)
