# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits beside float32 ones that get the same gradients and have the same moments."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.fidelity.training import Gradients, Recipe, TrainingRun, adamw
from benchmarks.int8_weights.kinds import FLOAT32, KINDS, Weights, decoded, int8


def distances(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Step the matrices of an fp32 run, kept in every way, on that run's gradients.

    All begin at INT8 values, so that only what steps do differs.

    Returns:
        A row per way: the distance of all weights from the float32 ones, over the way that these
        went; and the share of the way's square that the weights went in its direction.
    """
    run = TrainingRun(recipe)
    trainer, gradients = adamw(run.model, recipe), Gradients(run)
    parameters, layout = dict(run.model.named_parameters()), gradients.layout
    start = {name: decoded(int8(parameters[name].detach())) for name in layout.names}
    kept = {kind: Weights(kind, start, recipe) for kind in KINDS}
    for step in range(recipe.steps):
        grads = layout.views(gradients.next(step))
        for weights in kept.values():
            weights.set_gradients(grads)
            run.update(weights, step)
        run.update(trainer, step)
        on_step()
    begin = _flat(list(start.values()))
    right = _flat(kept[FLOAT32].values())
    return [_row(kind, _flat(weights.values()), right, begin) for kind, weights in kept.items()]


def _row(kind: str, flat: Tensor, right: Tensor, begin: Tensor) -> dict:
    way = right - begin
    return {
        "weights": kind,
        "distance_over_way": ((flat - right).norm() / way.norm()).item(),
        "share_in_direction": ((flat - begin) @ way / (way @ way)).item(),
    }


def _flat(matrices: list[Tensor]) -> Tensor:
    return torch.cat([one.reshape(-1) for one in matrices]).double()
