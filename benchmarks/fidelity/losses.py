# SPDX-License-Identifier: Apache-2.0
"""Trainings to the end, of several seeds, and what they are compared by: their final losses."""

import math
import statistics

import torch

from benchmarks.fidelity.schemes import SCHEMES, Rival, values
from benchmarks.fidelity.training import MAX_NORM, Setting


def final_loss(setting: Setting, scheme: str, seed: int) -> float:
    """Train with one scheme and return the validation loss.

    The model computes in float32 from exactly the values of the weights that the scheme keeps.
    """
    model = setting.make_model(seed)
    params = dict(model.named_parameters())
    rival = Rival(SCHEMES[scheme], setting, params)
    _hand_over(rival, params.values())
    for step in range(setting.steps):
        model.zero_grad()
        model(*setting.task.batch(seed, step)).backward()
        torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)
        rival.set_gradients([p.grad for p in params.values()])
        setting.step(rival.optimizer, step)
        _hand_over(rival, params.values())
    return setting.task.validation_loss(model)


@torch.no_grad()
def _hand_over(rival: Rival, params) -> None:
    for p, kept in zip(params, rival.params, strict=True):
        p.copy_(values(kept))


def loss_statistics(losses: list[float], fp32_losses: list[float]) -> dict:
    """Return the statistics over seeds, and those of the differences between runs of one seed."""
    differences = [loss - fp32 for loss, fp32 in zip(losses, fp32_losses, strict=True)]
    return {
        "val_losses": losses,
        "val_loss_mean": statistics.mean(losses),
        "difference_mean": statistics.mean(differences),
        "difference_standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }
