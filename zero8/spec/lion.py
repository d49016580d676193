# SPDX-License-Identifier: Apache-2.0
"""Lion (Chen et al., arXiv:2302.06675, algorithm 2) on one moment m.

With g the gradient, and every operation rounded once as `zero8.spec.arithmetic` says:

    c  = fma(1-beta1, g, beta1*m)            the direction                                   (L1)
    m' = fma(1-beta2, g, beta2*m)                                                            (L2)
    p  = fma(-lr, sign(c), (1 - lr*weight_decay) * p)                                        (L3)

sign(c) is 2^126 * c clipped to +-1: 0 where c is 0, and +-1 elsewhere, as c is never subnormal.
"""

from collections.abc import Sequence

from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.algorithm import Algorithm, Group, MomentRule, Scalars


class Lion(Algorithm):
    """Lion: the sign of an average of gradients, with decoupled weight decay."""

    name = "lion"
    number = 2
    class_name = "Lion8bitBlockwise"
    fp32_name = "an fp32 Lion"
    moments = (MomentRule("lion", "exp_avg", is_signed=True),)
    options = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    keywords = tuple(options)
    step_if_unknown = 0

    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """See `Algorithm`; every step has the same scalars."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return {
            "beta1": beta1,
            "beta2": beta2,
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta2": 1 - beta2,
            "lr": lr,
            "decay": 1 - lr * group["weight_decay"],
            "l2": 0.0,
            "grad_sign": -1.0 if group["maximize"] else 1.0,
        }

    def step(
        self, s: Scalars, p: Tensor, g: Tensor, moments: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See `Algorithm`."""
        (m,) = moments
        direction = ieee.fma(s.one_minus_beta1, g, ieee.mul(s.beta1, m))
        sign = ieee.mul(2.0**126, direction).clamp(-1.0, 1.0)
        m = ieee.fma(s.one_minus_beta2, g, ieee.mul(s.beta2, m))
        return [m], ieee.fma(-s.lr, sign, ieee.mul(s.decay, p))


LION = Lion()
