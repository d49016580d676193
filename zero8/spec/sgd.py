# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent with momentum, as `torch.optim.SGD` has it, on one moment m.

Sutskever et al. (2013), "On the importance of initialization and momentum in deep learning", in
torch's form, in which the learning rate multiplies the moment when it is used.  With g the
gradient, and every operation rounded once as `zero8.spec.arithmetic` says:

    m' = fma(1-dampening, g, M)   M = momentum*m decoded with momentum folded into the scale (M1)
    u  = fma(momentum, m', g)     Nesterov's update; without it u = fma(1, m', 0*g)          (M2)
    p  = fma(-lr, u, (1 - lr*weight_decay) * p)                                              (M3)

The first step has no dampening, as in torch: m' = g.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.algorithm import Algorithm, Group, MomentRule, Scalars
from zero8.spec.shown import shown


class Sgd(Algorithm):
    """SGD with momentum, perhaps Nesterov's, and L2 or decoupled weight decay."""

    name = "sgd"
    number = 3
    class_name = "SGD8bitBlockwise"
    fp32_name = "an fp32 SGD with momentum"
    moments = (MomentRule("sgd", "momentum_buffer", is_signed=True, decay="momentum"),)
    options = {
        "lr": 1e-3,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
        "decoupled_weight_decay": False,
    }
    keywords = tuple(options)
    step_if_unknown = 1  # torch's states do not say theirs; they have taken one at least
    fp32_options: Mapping[str, Any] = {"foreach": None, "differentiable": False, "fused": None}

    def check(self, group: Group) -> None:
        """See `Algorithm`."""
        super().check(group)
        momentum, dampening = group["momentum"], group.get("dampening", 0.0)
        if not 0 < momentum < 1:
            raise ValueError(
                f"momentum: got {shown(momentum)}, expected a number above 0 and below 1; "
                f"without momentum {self.class_name} has no states: use torch.optim.SGD"
            )
        if dampening > 1:
            raise ValueError(f"dampening: got {shown(dampening)}, expected at most 1")
        if group["nesterov"] and dampening:
            raise ValueError(
                f"nesterov: got true with a dampening of {shown(dampening)}, expected 0 beside it"
            )

    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """See `Algorithm`; only the first step has other scalars than the rest."""
        lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        is_decoupled, nesterov = group["decoupled_weight_decay"], group["nesterov"]
        return {
            "momentum": momentum,
            "grad_share": 1.0 if step == 1 else 1 - group["dampening"],
            "update_of_moment": momentum if nesterov else 1.0,
            "update_of_grad": 1.0 if nesterov else 0.0,
            "lr": lr,
            "decay": 1 - lr * decay if is_decoupled else 1.0,
            "l2": 0.0 if is_decoupled else decay,
            "grad_sign": -1.0 if group["maximize"] else 1.0,
        }

    def step(
        self, s: Scalars, p: Tensor, g: Tensor, moments: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See `Algorithm`."""
        m = ieee.fma(s.grad_share, g, moments[0])
        update = ieee.fma(s.update_of_moment, m, ieee.mul(s.update_of_grad, g))
        return [m], ieee.fma(-s.lr, update, ieee.mul(s.decay, p))


SGD = Sgd()
