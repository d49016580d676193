# SPDX-License-Identifier: Apache-2.0
"""Runs: many schemes on the gradients of one with fp32 states, and trainings to the end."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.fidelity.errors import Errors, Stalls, second_moments, sqrt_bias, sqrt_error
from benchmarks.fidelity.schemes import FP32, FP32_WEIGHTS, SCHEMES, Rival, Scheme, values
from benchmarks.fidelity.training import MAX_NORM, Gradients, Setting, flat

STALL_STEPS = 100


class States(Rival):
    """Parameters that are zero before every step, so that a step leaves -u in them.

        p' = (1 - lr*weight_decay) p - lr * mhat/(sqrt(vhat) + eps) = -u    for p = 0, lr = 1

    No optimizer needs to be looked into for this.
    """

    def __init__(self, scheme: Scheme, setting: Setting, weights: dict[str, Tensor]):
        """Make parameters of the shapes of some weights."""
        super().__init__(scheme, replace(setting, peak_lr=1.0, weight_decay=0.0), weights)

    def update(self, grads: list[Tensor], step: int) -> Tensor:
        """Take a step and return u, flat float32."""
        for p in self.params:
            p.detach().zero_()
        self.set_gradients(grads)
        self.optimizer.step()
        return -flat(map(values, self.params))


class Weights(Rival):
    """Weights that are kept from the start of a run to its end."""

    def __init__(self, scheme: Scheme, setting: Setting, weights: dict[str, Tensor]):
        """Copy the weights, and remember the learning rates of the setting."""
        super().__init__(scheme, setting, weights)
        self._setting = setting

    def update(self, grads: list[Tensor], step: int) -> Tensor:
        """Take a step and return by how much the weights fell, flat float32."""
        before = flat(map(values, self.params))
        self.set_gradients(grads)
        self._setting.step(self.optimizer, step)
        return before - flat(map(values, self.params))


class Entrant:
    """A scheme under measurement: its rival, and what was seen of its updates."""

    def __init__(self, scheme: Scheme, setting: Setting, gradients: Gradients):
        """Make the rival, from the matrices as they are."""
        kind = Weights if setting.keeps_weights else States
        self.rival = kind(scheme, setting, gradients.matrices)
        self._compared, self._untrained = setting.task.compared, gradients.untrained
        self._moved = torch.zeros(self._untrained.numel(), dtype=torch.bool)
        self._errors = Errors(flat(gradients.matrices.values())[self._compared].numel())
        self._largest = 0.0
        has_v = setting.algorithm == "Adam" and not setting.keeps_weights
        self.stalls = Stalls() if has_v else None

    def step(self, grads: list[Tensor], step: int) -> Tensor:
        """Take a step, note the largest |u| and what moved without a gradient; return u."""
        update = self.rival.update(grads, step)
        self._largest = max(self._largest, update.abs().max().item())
        self._moved |= update[self._untrained] != 0
        return update

    def compare(self, update: Tensor, reference: Tensor) -> None:
        """Add an update to the errors."""
        self._errors.compare(update[self._compared], reference[self._compared])

    def watch(self) -> None:
        """Note whether the codes of v have moved."""
        if self.stalls:
            self.stalls.add(*second_moments(self.rival.optimizer))

    def row(self, reference: "Entrant") -> dict:
        """Return what was measured."""
        v = {}
        if self.stalls:
            stored, exact = self.stalls.last, reference.stalls.last
            v = {
                "sqrt_v_bias": sqrt_bias(stored, exact),
                "sqrt_v_error": sqrt_error(stored, exact),
                "stalled": self.stalls.share(reference.stalls),
            }
        return {
            "bytes_per_param": self.rival.bytes_per_param(),
            "rms_update_error": self._errors.rms,
            "drift": self._errors.drift,
            "largest_update": self._largest,
            "zero_grad_moved": int(self._moved.sum()),
            **v,
        }


def replay(setting: Setting, schemes: Mapping[str, Scheme] = SCHEMES) -> list[dict]:
    """Feed the gradients of one fp32 run to all schemes of a setting, and compare their updates.

    Every scheme keeps its states for the whole run.  Errors and drift are those of the second half,
    those of sqrt(v) are of the end, and stalled elements of the last `STALL_STEPS` steps.

    Returns:
        A row per scheme.
    """
    model = setting.make_model(seed=0)
    gradients = Gradients(setting, model)
    trainer = SCHEMES[FP32].make(
        setting.algorithm,
        list(model.named_parameters()),
        {"weight_decay": setting.weight_decay, **setting.options},
    )
    exact = SCHEMES[FP32_WEIGHTS if setting.keeps_weights else FP32]
    reference = Entrant(exact, setting, gradients)
    entrants = {name: Entrant(schemes[name], setting, gradients) for name in setting.replayed}
    for step in range(setting.steps):
        grads = gradients.next(step)
        expected = reference.step(grads, step)
        for entrant in entrants.values():
            update = entrant.step(grads, step)
            if step >= setting.steps // 2:
                entrant.compare(update, expected)
        if step >= setting.steps - 1 - STALL_STEPS:
            for entrant in (reference, *entrants.values()):
                entrant.watch()
        setting.step(trainer, step)
    return [
        {"setting": setting.name, "scheme": name, **entrant.row(reference)}
        for name, entrant in entrants.items()
    ]


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
