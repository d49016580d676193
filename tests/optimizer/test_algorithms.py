# SPDX-License-Identifier: Apache-2.0
"""Steps of each algorithm as its paper and the reference define them."""

import math
from functools import partial

import pytest
import torch
from reference_twin import NAME, SEED, SHAPE, ReferenceTwin
from small_optimizers import (
    BETAS,
    DECAY,
    LR,
    OPTIONS,
    assert_equal,
    param,
    required_by,
    set_grads,
    small_model,
)
from torch import nn

from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.ademamix import beta3_at
from zero8.spec.codec import CODECS
from zero8.spec.segment import Rounding

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
codecs = pytest.mark.parametrize("codec", CODECS)
ADAM, LION, SGD, MIX = Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise, AdEMAMix8bitBlockwise
every = pytest.mark.parametrize("made", OPTIONS, ids=lambda one: one.algorithm.name)


# --- The step ------------------------------------------------------------------------------------


class Lion64:
    """Algorithm 2 of the paper."""

    def __init__(self, params, lr, betas, weight_decay):
        (self._p,), self._m = params, 0.0
        self._lr, self._betas, self._decay = lr, betas, weight_decay

    @torch.no_grad()
    def step(self):
        g, (beta1, beta2) = self._p.grad, self._betas
        update = (beta1 * self._m + (1 - beta1) * g).sign()
        self._p.mul_(1 - self._lr * self._decay).sub_(self._lr * update)
        self._m = beta2 * self._m + (1 - beta2) * g


class AdEMAMix64:
    """Algorithm 1 of the paper."""

    def __init__(self, params, **group):
        (self._p,), self._t = params, 0
        self._group = {**AdEMAMix8bitBlockwise([param(2, 2)]).defaults, **group}
        self._fast, self._slow, self._v = 0.0, 0.0, 0.0

    @torch.no_grad()
    def step(self):
        self._t += 1
        g, t, lr = self._p.grad, self._t, self._group["lr"]
        beta1, beta2, _ = self._group["betas"]
        beta3 = beta3_at(t, self._group)
        self._fast = beta1 * self._fast + (1 - beta1) * g
        self._slow = beta3 * self._slow + (1 - beta3) * g
        self._v = beta2 * self._v + (1 - beta2) * g * g
        alpha = self._group["alpha"] * min(1, t / self._group["t_alpha"])
        denominator = (self._v / (1 - beta2**t)).sqrt() + self._group["eps"]
        ratio = (self._fast / (1 - beta1**t) + alpha * self._slow) / denominator
        self._p.mul_(1 - lr * self._group["weight_decay"]).sub_(lr * ratio)


def sgd64(params, decoupled_weight_decay=False, weight_decay=0.0, **options):
    """Return torch's SGD; a decoupled decay shrinks the weights before each step."""
    made = torch.optim.SGD(
        params, weight_decay=0.0 if decoupled_weight_decay else weight_decay, **options
    )

    def shrink(*_):
        if decoupled_weight_decay:
            params[0].data.mul_(1 - options["lr"] * weight_decay)

    made.register_step_pre_hook(shrink)
    return made


EXACT = {
    **{
        f"adam {betas} {decay}": (ADAM, torch.optim.AdamW, {"betas": betas, "weight_decay": decay})
        for betas in ((0.9, 0.999), (0.9, 0.95), (0.0, 0.5))
        for decay in (0.0, DECAY)
    },
    "adam l2": (partial(ADAM, adam_w_mode=False), torch.optim.Adam, {"weight_decay": DECAY}),
    **{
        f"lion {betas}": (LION, Lion64, {"betas": betas, "weight_decay": DECAY})
        for betas in (BETAS, (0.95, 0.98), (0.0, 0.5))
    },
    "sgd": (SGD, sgd64, {"momentum": 0.9}),
    "sgd nesterov l2": (SGD, sgd64, {"momentum": 0.95, "nesterov": True, "weight_decay": DECAY}),
    "sgd dampening": (SGD, sgd64, {"momentum": 0.99, "dampening": 0.9, "maximize": True}),
    "sgd decoupled": (
        SGD, sgd64, {"momentum": 0.5, "weight_decay": DECAY, "decoupled_weight_decay": True},
    ),
    "ademamix": (MIX, AdEMAMix64, {"weight_decay": DECAY, "t_alpha": 10, "t_beta3": 20}),
}  # fmt: skip


@pytest.mark.parametrize(("made", "exact", "options"), EXACT.values(), ids=EXACT)
def test_algorithm_with_float32_moments_follows_its_paper_in_float64(made, exact, options):
    """After 40 steps within a hundredth of an update.

    Up to step t an average rounds 3t times, the denominator as often, and a quotient by it counts
    it twice: an update is within (9t + 14) 2^-24 of the magnitudes that it sums, which are at most
    12 LR (a momentum of 0.9 of gradients of size 1).  Over 40 steps that is 0.0055 LR.  A weight of
    at most 4 rounds 3 times a step, 40 x 3 x 4 x 2^-24 = 0.003 LR in all.  Lion's signs agree,
    unless its sum is below its rounding, as that of no element is here.
    """
    mine = param(70, 90)
    theirs = nn.Parameter(mine.detach().double())
    optimizer = made([mine], lr=LR, min_8bit_size=10**9, **options)
    twin = exact([theirs], lr=LR, **options)
    # From exact zeros over gradients that eps dominates to large ones.
    magnitude = torch.logspace(-11, 5, 90) if made is ADAM else torch.ones(90)
    magnitude[::10] = 0.0
    for step in range(40):
        set_grads([mine], step)
        mine.grad *= magnitude
        theirs.grad = mine.grad.double()
        optimizer.step()
        twin.step()
    assert (mine - theirs).abs().max() < LR / 100


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_algorithm_maximize_equals_negated_gradients(optimizer_class):
    model, other = small_model(), small_model()
    options = required_by(optimizer_class)
    up = optimizer_class(model.parameters(), maximize=True, **options)
    down = optimizer_class(other.parameters(), **options)
    for step in range(5):
        set_grads(model.parameters(), step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = -p.grad
        up.step()
        down.step()
    assert_equal(model.parameters(), other.parameters())


def test_ademamix_beta3_comes_up_so_that_the_memory_grows_in_equal_steps():
    """1/ln(beta3), which is the memory, is linear in t between those of beta1 and beta3."""
    group = {"betas": (0.9, 0.999, 0.9999), "t_beta3": 100}
    memory = [1 / math.log(beta3_at(t, group)) for t in range(1, 101)]
    start, end = 1 / math.log(0.9), 1 / math.log(0.9999)
    for t, found in enumerate(memory, 1):
        assert found == pytest.approx(start + (end - start) * t / 100, rel=1e-9)
    assert beta3_at(101, group) == beta3_at(1, {**group, "t_beta3": None}) == 0.9999


ROUNDINGS = dict.fromkeys(("auto", "dither"), Rounding.DITHER)
ROUNDINGS |= {"hash": Rounding.HASH, False: Rounding.NEAREST}


@every
@codecs
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(FP32, "dither"), *((BF16, one) for one in ROUNDINGS)], ids=str
)
def test_algorithm_steps_are_those_of_the_reference(made, codec, dtype, rounding):
    mine, theirs = param(*SHAPE, dtype=dtype), param(*SHAPE, dtype=dtype)
    settings = {"codec": codec, "seed": SEED, "stochastic_rounding": rounding}
    optimizer = made([(NAME, mine)], **settings, **OPTIONS[made])
    twin = ReferenceTwin(made.algorithm, codec)
    for step in range(1, 6):
        set_grads([mine], step)
        optimizer.step()
        twin.step(step, theirs, mine.grad, optimizer.param_groups[0], ROUNDINGS[rounding])
        assert_equal([mine], [theirs])
        twin.assert_is(optimizer.state[mine])


@every
@codecs
def test_algorithm_zero_gradients_never_move_parameters(made, codec):
    p = param(16, 300)
    idle = torch.rand(16, 300, generator=torch.Generator().manual_seed(1)) < 0.5
    before = p.detach().clone()
    optimizer = made([p], codec=codec, **OPTIONS[made] | {"lr": 0.1, "weight_decay": 0.0})
    for step in range(10):
        set_grads([p], step)
        p.grad[idle] = -0.0 if step % 2 else 0.0
        optimizer.step()
        assert torch.equal(p[idle], before[idle])
        if step == 0:
            assert (p != before)[~idle].all()
            assert made is not LION or ((p - before).abs()[~idle] - 0.1).abs().max() < 1e-6
    for store in optimizer.moments(p):
        assert (store.codes_of(0, 0, p.numel())[idle.flatten()] == store.code.zero_code).all()


def averaging(made, beta: float, start: torch.Tensor):
    """Return an optimizer whose first moment averages gradients from `start` on, and its p."""
    p = nn.Parameter(torch.zeros_like(start))
    if made is SGD:
        optimizer = made([p], lr=0.0, momentum=beta, dampening=beta)
        p.grad = start.clone()  # the first step has no dampening
    else:
        optimizer = made([p], lr=0.0, betas=(beta, 0.999, 0.999)[: 2 + (made is MIX)])
        p.grad = start / (1 - beta)
    optimizer.step()
    return optimizer, p


@pytest.mark.parametrize(("made", "beta"), [(SGD, 0.9), (SGD, 0.99), (ADAM, 0.98), (MIX, 0.99)])
def test_long_lived_moment_whose_gradient_has_ended_reaches_zero(made, beta):
    """The mean of an element after T steps is beta^T of its value; what is not 0 is 1/16 s at
    least, with s of the wide levels, or 1/32 of the narrow ones'.  So of 4,080 elements of up to
    247 s one is left with probability 4,080 * 3,952 * e^-35.
    """
    start = torch.rand(16, 256, generator=torch.Generator().manual_seed(2)) - 0.5
    optimizer, p = averaging(made, beta, start)
    p.grad = torch.zeros(16, 256)
    p.grad[:, 0] = 1.0  # the largest of each block lives on, and the scale with it
    for _ in range(round(35 / (1 - beta))):
        optimizer.step()
    m = optimizer.moments(p)[0].read(0, p.numel()).view(p.shape)
    assert (m[:, 1:] == 0).all() and (m[:, 0] > 0.9).all()
