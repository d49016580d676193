# SPDX-License-Identifier: Apache-2.0
"""Try states of Adam below two bytes per parameter, on recorded gradients and by final losses.

Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, workers, command, seconds, cpu_seconds: what was run.
    updates: update errors of codes of 12 bits, a row per beta2 and code; see
        `fidelity.metrics.Tally`.
    spreads: how unlike each other the v of a matrix are, a row per matrix; see `spreads`.
    losses: final validation losses, a row per model and kind of state.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.below.bands import Bands
from benchmarks.below.codes import BITS, TwelveBitCode
from benchmarks.below.report import markdown
from benchmarks.below.shared import Coded, Groups, Kept, KeptAdamW, Tiles
from benchmarks.below.spreads import spreads
from benchmarks.fidelity import runs
from benchmarks.fidelity.codes import FourBitCode
from benchmarks.fidelity.images import ImageTask
from benchmarks.fidelity.lora import LoraTask
from benchmarks.fidelity.losses import FP32, loss_job, loss_statistics, train
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.schemes import reimplemented
from benchmarks.fidelity.states import BETA2S
from benchmarks.fidelity.training import Recipe, TrainingRun

FOUR_BIT = "4bit"
CODES = {f"m {bits} + v {BITS - bits} bits": TwelveBitCode(bits) for bits in (4, 5, 6)}
REPLAYED_STEPS = 150
SEEDS = tuple(range(1, 11))
MODELS: dict[str, dict] = {
    "GPT": {"steps": 400},
    "LoRA": {"steps": 200, "task": LoraTask()},
    "convolutions": {"steps": 200, "task": ImageTask()},
}
GROUPS, TILES = ("v of 64 in a row", Groups(64)), ("v of rank 1, 256 x 256", Tiles(256))
BANDS = ("v of rank 1, 64 x 256 in bytes", Bands())
CODED = {name: Coded(code) for name, code in CODES.items() if name == "m 6 + v 6 bits"}
KEPT: dict[str, dict[str, Kept]] = {
    "GPT": {**CODED, **dict([GROUPS, ("v of rank 1, 64 x 64", Tiles(64)), TILES, BANDS])},
    "LoRA": dict([GROUPS, TILES, BANDS]),
    "convolutions": dict([GROUPS, TILES, BANDS]),
}


def replay_codes(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Run the replay with the codes of 12 bits and with Li et al.'s of 8."""
    note = "from arXiv:2309.01507, without its rank-1 scales"
    codes = [reimplemented(name, code, "") for name, code in CODES.items()]
    return replay(recipe, [reimplemented(FOUR_BIT, FourBitCode(), note), *codes], on_step)[0]


def kept_loss(recipe: Recipe, kept: Kept, on_step: Callable[[], None]) -> tuple[float, float]:
    """Train and return the validation loss, and the bytes per parameter of the matrices' states."""
    run = TrainingRun(recipe)
    optimizer = KeptAdamW(run.model.parameters(), kept, recipe.betas, recipe.weight_decay)
    return train(run, optimizer, on_step), optimizer.bytes_per_param()


def _replay(beta2: float) -> Job:
    return Job(replay_codes, (Recipe(REPLAYED_STEPS, beta2),), REPLAYED_STEPS)


def _spreads() -> Job:
    return Job(spreads, (Recipe(REPLAYED_STEPS, BETA2S[0]),), REPLAYED_STEPS)


def _recipes(model: str) -> list[Recipe]:
    return [Recipe(beta2=BETA2S[0], seed=seed, **MODELS[model]) for seed in SEEDS]


def _fp32(model: str) -> list[Job]:
    return [loss_job(recipe, FP32) for recipe in _recipes(model)]


def _trainings(model: str, kept: Kept) -> list[Job]:
    return [Job(kept_loss, (recipe, kept), recipe.steps) for recipe in _recipes(model)]


def jobs() -> list[Job]:
    """Return everything that is to be run."""
    trainings = [
        job
        for model, kinds in KEPT.items()
        for some in (*(_trainings(model, kept) for kept in kinds.values()), _fp32(model))
        for job in some
    ]
    return [*map(_replay, BETA2S), *trainings, _spreads()]


def loss_rows(results: dict[Job, Any], model: str) -> list[dict]:
    """Return a row per kind of state of a model: final losses and their differences to fp32's."""
    fp32 = [results[job] for job in _fp32(model)]
    found = {FP32: (fp32, 8.0)}
    for name, kept in KEPT[model].items():
        losses, sizes = zip(*(results[job] for job in _trainings(model, kept)), strict=True)
        found[name] = (list(losses), sizes[0])
    return [
        {
            "model": model,
            "scheme": name,
            "bytes_per_param": size,
            "beta2": BETA2S[0],
            "steps": MODELS[model]["steps"],
            "seeds": list(SEEDS),
            **loss_statistics(losses, fp32),
        }
        for name, (losses, size) in found.items()
    ]


def rows_of(results: dict[Job, Any]) -> dict:
    """Return the rows of the result, from the results of all jobs."""
    return {
        "updates": [
            {"steps": REPLAYED_STEPS, **row} for beta2 in BETA2S for row in results[_replay(beta2)]
        ],
        "spreads": results[_spreads()],
        "losses": [row for model in KEPT for row in loss_rows(results, model)],
    }


def measure(workers: int) -> dict:
    """Run everything and return the result, all but the time and the command."""
    environment = runs.environment(workers)
    return {**rows_of(run_jobs(jobs(), workers=workers, label="below")), **environment}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write both files."""
    return runs.main("benchmarks.below", __doc__, measure, markdown, argv)
