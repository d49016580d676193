# SPDX-License-Identifier: Apache-2.0
"""AdEMAMix (Pagliardini et al., arXiv:2409.03137, algorithm 1) on three moments f, s and v.

Adam with a second average of the gradients, s, whose memory is long.  With g the gradient, and
every operation rounded once as `zero8.spec.arithmetic` says:

    f' = fma(1-beta1, g, F)      F = beta1*f  decoded with beta1 folded into the scale       (E1)
    s' = fma(1-beta3, g, S)      S = beta3*s  decoded with beta3 folded in                   (E2)
    v', d                        Adam's, equations (R3) and (R4)
    r  = fma(alpha, s', f'/(1-beta1^t))/d, clipped to +-max_ratio                            (E3)
    p  = fma(-lr, r, (1 - lr*weight_decay) * p)                                              (E4)

f'/(1-beta1^t) is the product with the rounded inverse.  alpha and beta3 come up to their values
over the first t_alpha and t_beta3 steps:

    alpha_t = alpha * min(1, t/t_alpha)
    beta3_t = min(beta3, exp(ln beta1 ln beta3 / ((1 - t/t_beta3) ln beta3 + t/t_beta3 ln beta1)))

max_ratio bounds |r| for exact moments: |f| and |s| are at most sqrt(K v), with K of equation (S1)
in `zero8.spec.adam` for the betas of each.  It grows without limit where beta3^2 > beta2.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from zero8.spec import arithmetic as ieee
from zero8.spec.adam import next_history, second_moment
from zero8.spec.algorithm import Algorithm, Group, MomentRule, Scalars
from zero8.spec.log import settling
from zero8.spec.options import SMALLEST_EPS
from zero8.spec.shown import shown


class Ademamix(Algorithm):
    """AdEMAMix, with decoupled weight decay."""

    name = "ademamix"
    number = 4
    class_name = "AdEMAMix8bitBlockwise"
    fp32_name = "an fp32 AdEMAMix"
    moments = (
        MomentRule("ademamix", "exp_avg_fast", is_signed=True, decay="beta1", is_dithered=False),
        MomentRule("ademamix", "exp_avg_slow", is_signed=True, decay="beta3"),
        MomentRule("ademamix", "exp_avg_sq", is_signed=False, decay="beta2"),
    )
    memory = ("history", "history_slow")
    options = {
        "lr": 1e-3,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
        "t_alpha": None,
        "t_beta3": None,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "maximize": False,
    }
    keywords = tuple(options)

    def check(self, group: Group) -> None:
        """See `Algorithm`."""
        super().check(group)
        betas, warm_up = list(group["betas"]), group["t_beta3"]
        if warm_up and not 0 < betas[0] <= betas[2]:
            raise ValueError(
                f"t_beta3: got {shown(warm_up)} with betas {betas}, expected a beta1 above 0 and "
                "at most beta3"
            )

    def next_memory(self, step: int, memory: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """See `Algorithm`."""
        beta1, beta2, _ = map(float, group["betas"])
        fast, slow = memory
        return next_history(fast, beta1, beta2), next_history(slow, beta3_at(step, group), beta2)

    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """See `Algorithm`; the bias is always corrected."""
        beta1, beta2, _ = map(float, group["betas"])
        beta3, lr = beta3_at(step, group), float(group["lr"])
        alpha = group["alpha"] * min(1.0, step / group["t_alpha"] if group["t_alpha"] else 1.0)
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        fast, slow = map(math.sqrt, memory)
        return {
            "beta1": beta1,
            "beta3": beta3,
            "beta2": beta2,
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta3": 1 - beta3,
            "sqrt_one_minus_beta2": math.sqrt(1 - beta2),
            "inverse_sqrt_correction2": 1 / math.sqrt(correction2),
            "eps": max(group["eps"], SMALLEST_EPS),
            "inverse_correction1": 1 / correction1,
            "alpha": alpha,
            "max_ratio": (fast / correction1 + alpha * slow) * math.sqrt(correction2),
            "lr": lr,
            "decay": 1 - lr * group["weight_decay"],
            "l2": 0.0,
            "grad_sign": -1.0 if group["maximize"] else 1.0,
            "settling": settling(beta1),
        }

    def step(
        self, s: Scalars, p: Tensor, g: Tensor, moments: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """See `Algorithm`."""
        fast = ieee.fma(s.one_minus_beta1, g, moments[0])
        slow = ieee.fma(s.one_minus_beta3, g, moments[1])
        v, denominator = second_moment(s, g, moments[2])
        corrected = ieee.mul(s.inverse_correction1, fast)
        ratio = ieee.div(ieee.fma(s.alpha, slow, corrected), denominator)
        clipped = ratio.clamp(-s.max_ratio, s.max_ratio)
        return [fast, slow, v], ieee.fma(-s.lr, clipped, ieee.mul(s.decay, p))


def beta3_at(step: int, group: Group) -> float:
    """Return the decay rate of the slow average at a step, counted from 1."""
    beta1, _, beta3 = map(float, group["betas"])
    if not group["t_beta3"] or step >= group["t_beta3"] or beta1 == beta3:
        return beta3
    share, start, end = step / group["t_beta3"], math.log(beta1), math.log(beta3)
    return min(beta3, math.exp(start * end / ((1 - share) * end + share * start)))


ADEMAMIX = Ademamix()
