# SPDX-License-Identifier: Apache-2.0
"""Muon: momentum whose update is orthogonalized, on one moment m.

Keller Jordan (2024), "Muon: An optimizer for hidden layers in neural networks", in the form of
`torch.optim.Muon`.  With g the gradient, and every operation rounded once as
`zero8.spec.arithmetic` says:

    m' = fma(1-momentum, g, M)   M = momentum*m decoded with momentum folded into the scale   (O1)
    u  = fma(momentum, m', (1-momentum)*g)   Nesterov's update; without it u = fma(1, m', 0*g)  (O2)
    O  = the orthogonalized matrix of u (`zero8.spec.newton_schulz`)                            (O3)
    p  = fma(-lr*ratio, O, (1 - lr*weight_decay) * p)                                           (O4)

(O1), (O2) and (O4) have the form of SGD's (M1) to (M3), so its kernel computes them, in two calls:
the first writes u where SGD has the parameter, with -1 for lr and 0 for the decay; the second has
O for the gradient, and for a moment that it keeps as it is.

The ratio is 0.2*sqrt(max(rows, columns)), with which the root mean square of an update is about
that of AdamW's, so that both can have one lr (Liu et al., arXiv:2502.16982, section 2.2), or Keller
Jordan's sqrt(max(1, rows/columns)).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zero8.spec.algorithm import Algorithm, Group, MomentRule, Scalars
from zero8.spec.newton_schulz import COEFFICIENTS
from zero8.spec.sgd import SGD, Sgd
from zero8.spec.shown import shown

RATIOS = ("match_rms_adamw", "original", None)
"""The valid `adjust_lr_fn`; None means "original", as in torch."""
PRECISIONS = ("auto", "bfloat16", "float32")
"""The valid `ns_dtype`."""
LEAST_EPS = 2.0**-63
"""The least `ns_eps`: squares of smaller numbers underflow."""
MAX_STEPS = 99
"""The most Newton-Schulz steps, as in torch."""


class Muon(Sgd):
    """Muon with Nesterov's momentum or without, and decoupled weight decay."""

    name = "muon"
    number = 5
    class_name = "Muon8bitBlockwise"
    fp32_name = "an fp32 Muon"
    moments = (MomentRule("muon", "momentum_buffer", is_signed=True, decay="momentum"),)
    options = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": COEFFICIENTS,
        "ns_steps": 5,
        "ns_eps": 1e-7,
        "ns_dtype": PRECISIONS[0],
        "adjust_lr_fn": RATIOS[0],
        "maximize": False,
    }
    keywords = (*options, "betas", "eps", "adam_params", "muon_lr", "adam_lr")
    no_effect_keys = ("ns_method",)  # DeepSpeed's: two ways of computing (N1)
    fp32_options = {}
    is_of_matrices = True

    @property
    def kernel(self) -> Algorithm:
        """See `Algorithm`."""
        return SGD

    def fp32_group(self, group: Group) -> dict[str, Any]:
        """See `Algorithm`; torch's Muon calls ns_eps eps, which is AdamW's in other groups."""
        has_matrices = group.get("use_muon", False) and "ns_eps" in group
        return {**group, "eps": group["ns_eps"]} if has_matrices else dict(group)

    def check(self, group: Group) -> None:
        """See `Algorithm`."""
        super().check(group)
        if group["ns_eps"] < LEAST_EPS:
            raise ValueError(
                f"ns_eps: got {shown(group['ns_eps'])}, expected at least {LEAST_EPS:.1e}, so that "
                "matrices of zeros stay zeros"
            )
        steps = group["ns_steps"]
        if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
            raise ValueError(
                f"ns_steps: got {shown(steps)}, expected an integer from 1 to {MAX_STEPS}"
            )
        coefficients = group["ns_coefficients"]
        if not isinstance(coefficients, list | tuple) or len(coefficients) != 3:
            raise ValueError(f"ns_coefficients: got {shown(coefficients)}, expected 3 numbers")
        for one in coefficients:
            if not isinstance(one, int | float) or isinstance(one, bool) or not math.isfinite(one):
                raise ValueError(f"ns_coefficients: got {shown(one)}, expected finite numbers")
        for name, valid in (("adjust_lr_fn", RATIOS), ("ns_dtype", PRECISIONS)):
            if group[name] not in valid:
                raise ValueError(f"{name}: got {shown(group[name])}, expected one of {list(valid)}")

    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """See `Algorithm`; `lr` is not multiplied by the ratio yet."""
        lr, momentum, nesterov = float(group["lr"]), group["momentum"], group["nesterov"]
        return {
            "momentum": momentum,
            "grad_share": 1 - momentum,
            "update_of_moment": momentum if nesterov else 1.0,
            "update_of_grad": 1 - momentum if nesterov else 0.0,
            "lr": lr,
            "decay": 1 - lr * group["weight_decay"],
            "l2": 0.0,
            "grad_sign": -1.0 if group["maximize"] else 1.0,
        }


def matrices_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return how many matrices a parameter has, and their rows and columns.

    Three dimensions are the matrices of experts; of four and more, such as filters of convolutions,
    the first are the rows, as in Keller Jordan's Muon.
    """
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def ranges_by_matrix(
    shape: Sequence[int], first: int, numel: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number of a matrix, first element in it, numel) for elements of a parameter.

    `shape` is the whole parameter's; the elements are `numel` from `first` on.
    """
    _, rows, columns = matrices_of(shape)
    end = first + numel
    while first < end:
        number, inside = divmod(first, rows * columns)
        here = min(end - first, rows * columns - inside)
        yield number, inside, here
        first += here


def multiplications(shape: Sequence[int]) -> int:
    """Return the multiplications of a step of (N1) of `zero8.spec.newton_schulz`.

    Its three products of matrices have 2 r^2 c + r^3 of them, with r the smaller of rows and
    columns, and c the larger.
    """
    matrices, rows, columns = matrices_of(shape)
    r, c = sorted((rows, columns))
    return matrices * (2 * r**2 * c + r**3)


def lr_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Return what the learning rate of a matrix is multiplied by."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def forming(s: Scalars) -> Scalars:
    """Return the scalars with which SGD's kernel computes (O1), and (O2) as a parameter of 0."""
    return s._replace(lr=-1.0, decay=0.0)


def applying(s: Scalars, ratio: float) -> Scalars:
    """Return the scalars with which SGD's kernel computes (O4), with O as gradient and moment."""
    return s._replace(
        momentum=0.0,
        grad_share=1.0,
        update_of_moment=1.0,
        update_of_grad=0.0,
        lr=float(np.float32(s.lr * ratio)),
        grad_sign=1.0,
        grad_factor=1.0,
    )


MUON = Muon()
