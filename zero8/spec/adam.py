# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) on two moments m and v.

With g the gradient, and every operation rounded once as `zero8.spec.arithmetic` says:

    m' = fma(1-beta1, g, M)      M = beta1*m  decoded with beta1 folded into the scale       (R2)
    h  = sqrt(1-beta2) * g
    v' = fma(h, h, V)            V = beta2*v  decoded with beta2 folded in                   (R3)
    d  = fma(sqrt(v'), 1/sqrt(1-beta2^t), eps)             eps at least 2^-126               (R4)
    r  = m'/d, clipped to +-max_ratio                      equation (S1)                     (R5)
    p  = fma(-lr/(1-beta1^t), r, (1 - lr*weight_decay) * p)                                  (R6)
"""

import math
from collections.abc import Sequence

from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.algorithm import UNKNOWN, Algorithm, Group, MomentRule, Scalars
from zero8.spec.log import settling
from zero8.spec.options import SMALLEST_EPS


class Adam(Algorithm):
    """AdamW, or Adam with L2 regularization."""

    name = "adam"
    number = 1
    class_name = "Adam8bitBlockwise"
    fp32_name = "an fp32 Adam"
    moments = (
        MomentRule("adam", "exp_avg", is_signed=True, decay="beta1", is_dithered=False),
        MomentRule("adam", "exp_avg_sq", is_signed=False, decay="beta2"),
    )
    memory = ("history",)
    options = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "maximize": False,
        "decoupled_weight_decay": True,
    }
    keywords = ("lr", "betas", "eps", "weight_decay", "adam_w_mode", "bias_correction", "maximize")
    fp32_options = {
        "amsgrad": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
    }

    def next_memory(self, step: int, memory: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """See `Algorithm`."""
        betas = group["betas"]
        return (next_history(memory[0], float(betas[0]), float(betas[1])),)

    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """See `Algorithm`; an `eps` of 0 stands for `SMALLEST_EPS`."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        decay, is_decoupled = group["weight_decay"], group["decoupled_weight_decay"]
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
        # max_ratio bounds |m| / (sqrt(v)/sqrt(correction2) + eps) for exact moments, so clipping
        # there only removes rounding errors.  Three roundings to float32 follow, 2^-24 each: of
        # max_ratio, of step_size and of their product.  2^-22 less keeps |u| under its bound.
        below = 1 - 2.0**-22
        return {
            "beta1": beta1,
            "beta2": beta2,
            "one_minus_beta1": 1 - beta1,
            "sqrt_one_minus_beta2": math.sqrt(1 - beta2),
            "inverse_sqrt_correction2": 1 / math.sqrt(correction2),
            "eps": max(group["eps"], SMALLEST_EPS),
            "max_ratio": math.sqrt(memory[0] * correction2) * below,
            "step_size": lr / correction1,
            "decay": 1 - lr * decay if is_decoupled else 1.0,
            "l2": 0.0 if is_decoupled else decay,
            "grad_sign": -1.0 if group["maximize"] else 1.0,
            "settling": settling(beta1),
        }

    def step(
        self, s: Scalars, p: Tensor, g: Tensor, moments: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See `Algorithm`."""
        m = ieee.fma(s.one_minus_beta1, g, moments[0])
        v, denominator = second_moment(s, g, moments[1])
        ratio = ieee.div(m, denominator).clamp(-s.max_ratio, s.max_ratio)
        return [m, v], ieee.fma(-s.step_size, ratio, ieee.mul(s.decay, p))


def second_moment(s: Scalars, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new second moment and the denominator, equations (R3) and (R4)."""
    h = ieee.mul(s.sqrt_one_minus_beta2, g)
    new = ieee.fma(h, h, v)
    return new, ieee.fma(ieee.sqrt(new), s.inverse_sqrt_correction2, s.eps)


def next_history(history: float, beta1: float, beta2: float) -> float:
    """Return the bound on m^2/v after one more step with these betas.

    m = sum a_i g_i and v = sum b_i g_i^2 over the gradients seen so far, so by Cauchy-Schwarz
    m^2 <= v * sum a_i^2/b_i =: v * K.  A step multiplies every a_i by beta1, every b_i by beta2,
    and adds a term:

        K' = (beta1^2/beta2) K + (1-beta1)^2/(1-beta2),    K_0 = 0                           (S1)

    which holds for betas that change from step to step, and for beta1^2 >= beta2 (K then grows
    without limit).  With constant betas it is the finite-t bound of the geometric series.
    """
    if beta2 == 0.0:
        # v remembers one gradient only: no bound unless m does too.
        return 1.0 if beta1 == 0.0 else UNKNOWN
    grown = beta1**2 / beta2 * history + (1 - beta1) ** 2 / (1 - beta2)
    return min(grown, UNKNOWN)


ADAM = Adam()
