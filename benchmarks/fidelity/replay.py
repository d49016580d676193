# SPDX-License-Identifier: Apache-2.0
"""Replay: many schemes on the gradients of one run with fp32 states."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

import zero8
from benchmarks.fidelity.errors import Errors, sqrt_bias
from benchmarks.fidelity.schemes import FP32, FP32_WEIGHTS, SCHEMES, Rival, Scheme, values
from benchmarks.fidelity.training import Gradients, Setting, flat


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

    def step(self, grads: list[Tensor], step: int) -> Tensor:
        """Take a step, note the largest |u| and what moved without a gradient; return u."""
        update = self.rival.update(grads, step)
        self._largest = max(self._largest, update.abs().max().item())
        self._moved |= update[self._untrained] != 0
        return update

    def compare(self, update: Tensor, reference: Tensor) -> None:
        """Add an update to the errors."""
        self._errors.compare(update[self._compared], reference[self._compared])

    def row(self, reference: "Entrant", has_v: bool) -> dict:
        """Return what was measured."""
        v = second_moments(self.rival) if has_v else None
        return {
            "bytes_per_param": self.rival.bytes_per_param(),
            "rms_update_error": self._errors.rms,
            "drift": self._errors.drift,
            "largest_update": self._largest,
            "zero_grad_moved": int(self._moved.sum()),
            "sqrt_v_bias": None if v is None else sqrt_bias(v, second_moments(reference.rival)),
        }


def replay(setting: Setting, schemes: Mapping[str, Scheme] = SCHEMES) -> list[dict]:
    """Feed the gradients of one fp32 run to all schemes of a setting, and compare their updates.

    Every scheme keeps its states for the whole run.  Errors and drift are those of the second half,
    the bias of sqrt(v) is that of the end.

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
        setting.step(trainer, step)
    has_v = setting.algorithm == "Adam" and not setting.keeps_weights
    return [
        {"setting": setting.name, "scheme": name, **entrant.row(reference, has_v)}
        for name, entrant in entrants.items()
    ]


def second_moments(rival: Rival) -> Tensor | None:
    """Return the stored v of all parameters of an Adam, flat float32; None where it is encoded."""
    read = getattr(rival.optimizer, "moments", None)  # zero8's, and re-implemented ones
    if isinstance(rival.optimizer, zero8.Adam8bitBlockwise):
        return flat(read(p)[1].read(0, p.numel()) for p in rival.params)
    if read is not None:
        return flat(read(p)[1] for p in rival.params)
    found = [rival.optimizer.state[p].get("exp_avg_sq") for p in rival.params]
    is_plain = all(type(v) is Tensor for v in found)
    return flat(v.float() for v in found) if is_plain else None
