# SPDX-License-Identifier: Apache-2.0
"""What one optimizer step needs besides the tensors: computed in double, handed over as float32.

Nothing in a kernel depends on the step count or on hyper-parameters except through this struct, so
every kernel and the reference agree on it bit for bit.
"""

import math
from typing import NamedTuple

import numpy as np

UNKNOWN_HISTORY = 3.4e38
"""Bound on m^2/v where the moments were not made by steps that were counted."""


SMALLEST_EPS = 2.0**-126
"""The smallest normal float: kernels take less for 0, and 0/0, of what has no gradient, is no 0."""


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
        return 1.0 if beta1 == 0.0 else UNKNOWN_HISTORY
    grown = beta1**2 / beta2 * history + (1 - beta1) ** 2 / (1 - beta2)
    return min(grown, UNKNOWN_HISTORY)


class StepScalars(NamedTuple):
    """The scalars of equations (R1)-(R8) of `zero8.spec.reference`, all float32 values."""

    beta1: float
    beta2: float
    one_minus_beta1: float
    sqrt_one_minus_beta2: float
    inverse_sqrt_correction2: float
    eps: float
    max_ratio: float
    step_size: float
    decay: float
    l2: float
    grad_sign: float
    settling: float

    @classmethod
    def at(
        cls,
        step: int,
        history: float,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
    ) -> "StepScalars":
        """Return the scalars of step number `step` (the first is 1).

        Args:
            step: how many steps the moments will have seen after this one.
            history: bound on m^2/v after this step, from `next_history`.
            lr: learning rate.
            betas: decay rates of the two moments.
            eps: added to the root of the corrected second moment; 0 stands for `SMALLEST_EPS`.
            weight_decay: per unit of lr where `decoupled`, else added to the gradient.
            decoupled: AdamW (True) or Adam with L2 regularisation (False).
            bias_correction: divide the moments by 1 - beta^step.
            maximize: ascend instead of descend.
        """
        beta1, beta2 = betas
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
        # max_ratio bounds |m| / (sqrt(v)/sqrt(correction2) + eps) for exact moments, so clipping
        # there only takes rounding errors away.  Three roundings to float32 follow, 2^-24 each: of
        # max_ratio, of step_size and of their product.  2^-22 less keeps |u| under its bound.
        below = 1 - 2.0**-22
        exact = cls(
            beta1=beta1,
            beta2=beta2,
            one_minus_beta1=1 - beta1,
            sqrt_one_minus_beta2=math.sqrt(1 - beta2),
            inverse_sqrt_correction2=1 / math.sqrt(correction2),
            eps=max(eps, SMALLEST_EPS),
            max_ratio=math.sqrt(history * correction2) * below,
            step_size=lr / correction1,
            decay=1 - lr * weight_decay if decoupled else 1.0,
            l2=0.0 if decoupled else weight_decay,
            grad_sign=-1.0 if maximize else 1.0,
            # (C2') of zero8.spec.codec; float32 tells it from 1.
            settling=1 + max(2.0**-20, 0.97 * min(1.0, 1 / beta1 - 1 if beta1 else 1.0)),
        )
        return cls(*np.array(exact, np.float32).tolist())
