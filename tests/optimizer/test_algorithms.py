# SPDX-License-Identifier: Apache-2.0
"""Steps of each algorithm as its paper and the reference define them."""

import math

import pytest
import torch
from reference_twin import NAME, SEED, SHAPE, ReferenceTwin
from small_optimizers import (
    BETAS,
    DECAY,
    LR,
    OPTIONS,
    assert_equal,
    gamma,
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)], ids=str)
def test_adam_float32_moments_follow_adamw(betas, weight_decay):
    """torch's AdamW in float64 is the exact value; the bound counts our roundings up to step t.

    m = sum a_i g_i: a term rounds 3 times per step (constant, product, sum), 3t in all, so m is
    within gamma(3t) sum a_i |g_i| =: gamma(3t) M.  v has positive terms of 3t + 2 roundings, and
    d = sqrt(v)/sqrt(1-b2^t) + eps is relative to itself within gamma(3t + 5).  A quotient by d
    counts that twice, and rounds: m/d is within gamma(9t + 11) M/d.  With the rounded step size,
    decay and the last fma, with e_t the error of the parameter and s the step size:

        e_t = decay (1 + gamma(3)) e_{t-1} + gamma(3) decay |p| + s gamma(9t + 13) M/d

    One more rounding covers that float64 rounds too.
    """
    lr, eps, (beta1, beta2) = 1e-2, 1e-8, betas
    mine = param(70, 90)
    exact = nn.Parameter(mine.detach().double())
    keywords = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    optimizer = Adam8bitBlockwise([mine], min_8bit_size=10**9, **keywords)
    adamw = torch.optim.AdamW([exact], foreach=False, **keywords)
    # From exact zeros over gradients that eps dominates to large ones.
    magnitude = torch.logspace(-11, 5, 90)
    magnitude[::10] = 0.0
    error, absolute_m = torch.zeros(70, 90).double(), torch.zeros(70, 90).double()
    for t in range(1, 41):
        set_grads([mine], t)
        mine.grad *= magnitude
        exact.grad = mine.grad.double()
        before = exact.detach().abs()
        optimizer.step()
        adamw.step()
        absolute_m = beta1 * absolute_m + (1 - beta1) * exact.grad.abs()
        d = (adamw.state[exact]["exp_avg_sq"] / (1 - beta2**t)).sqrt() + eps
        decay, size = 1 - lr * weight_decay, lr / (1 - beta1**t)
        error = decay * ((1 + gamma(3)) * error + gamma(3) * before)
        error += size * gamma(9 * t + 14) * absolute_m / d
        assert ((mine - exact).abs() <= error).all(), f"step {t}"
    assert error.max() < lr / 50  # the bound is far below one update


def test_adam_l2_adds_decay_to_the_gradient():
    """Exact sums of eighths: the same bits as without decay on the summed gradient."""
    mine, theirs = (nn.Parameter(torch.arange(6400.0).view(64, 100) / 8 - 400) for _ in range(2))
    mine.grad = torch.randint(-8, 9, (64, 100)) / 8
    theirs.grad = mine.grad + 0.5 * theirs.detach()
    Adam8bitBlockwise([mine], weight_decay=0.5, adam_w_mode=False).step()
    Adam8bitBlockwise([theirs]).step()
    assert_equal([mine], [theirs])


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


@pytest.mark.parametrize("betas", [BETAS, (0.95, 0.98), (0.0, 0.5)], ids=str)
def test_lion_float32_moments_follow_the_paper(betas):
    """Algorithm 2 in float64 is the exact value.

    m = sum a_i g_i: a term rounds 3 times per step (constant, product, sum), so c is within
    gamma(3t) C, where C = beta1 M + (1-beta1) |g| and M = sum a_i |g_i|.  Where |c| is larger than
    that, the signs agree, and p has rounded lr, decay, their product and the sum:

        e_t = decay (1 + gamma(3)) e_{t-1} + gamma(3) (decay |p| + lr)

    Elsewhere Lion may go either way, and these elements are not compared from then on.
    """
    beta1, beta2 = betas
    p = param(70, 90)
    exact = p.detach().double()
    optimizer = Lion8bitBlockwise([p], lr=LR, betas=betas, weight_decay=DECAY, min_8bit_size=10**9)
    m, absolute, error = (torch.zeros(70, 90).double() for _ in range(3))
    sure = torch.ones(70, 90, dtype=torch.bool)
    for t in range(1, 41):
        set_grads([p], t)
        p.grad[:, ::10] = 0.0
        g = p.grad.double()
        optimizer.step()
        c = beta1 * m + (1 - beta1) * g
        doubt = gamma(3 * t) * (beta1 * absolute + (1 - beta1) * g.abs())
        sure &= (c.abs() > doubt) | (absolute + g.abs() == 0)
        decay = 1 - LR * DECAY
        error = decay * (1 + gamma(3)) * error + gamma(3) * (decay * exact.abs() + LR)
        exact = decay * exact - LR * c.sign()
        m = beta2 * m + (1 - beta2) * g
        absolute = beta2 * absolute + (1 - beta2) * g.abs()
        assert ((p.detach() - exact).abs() <= error)[sure].all(), f"step {t}"
    assert sure.float().mean() > 0.99
    assert error.max() < LR / 50  # the bound is far below one update


SGDS = {
    "momentum": {"momentum": 0.9},
    "nesterov, L2": {"momentum": 0.95, "nesterov": True, "weight_decay": DECAY},
    "dampening, maximize": {"momentum": 0.99, "dampening": 0.9, "maximize": True},
    "decoupled decay": {"momentum": 0.5, "weight_decay": DECAY, "decoupled_weight_decay": True},
}


@pytest.mark.parametrize("options", SGDS.values(), ids=SGDS)
def test_sgd_float32_moments_follow_torch(options):
    """torch's SGD in float64 is the exact value.

    Each equation rounds 3 times (a constant, a product, the fma), so its result is within gamma(3)
    of the sum of its terms' magnitudes, plus their errors times the coefficients.  Magnitudes are
    the exact ones and their errors.
    """
    options = {"lr": LR, **options}
    p = param(70, 90)
    exact = nn.Parameter(p.detach().double())
    optimizer = SGD8bitBlockwise([p], min_8bit_size=10**9, **options)
    is_decoupled = options.pop("decoupled_weight_decay", False)
    decay = options.get("weight_decay", 0.0)
    twin = torch.optim.SGD([exact], **options | ({"weight_decay": 0.0} if is_decoupled else {}))
    l2 = 0.0 if is_decoupled else decay
    shrunk = 1 - LR * decay if is_decoupled else 1.0
    momentum, nesterov = options["momentum"], options.get("nesterov", False)

    def rounded(*terms):
        """Return the error of a sum of coefficients times values with errors."""
        inherited = sum(c * error for c, _, error in terms)
        return inherited + gamma(3) * sum(c * (size + error) for c, size, error in terms)

    zero = torch.zeros_like(exact)
    m = error = m_error = zero
    for t in range(1, 31):
        set_grads([p], t)
        exact.grad = p.grad.double()
        share = 1.0 if t == 1 else 1 - options.get("dampening", 0.0)
        before, g = exact.detach().abs(), exact.grad.abs()
        g_error = rounded((1.0, g, zero), (l2, before, error)) if l2 else zero
        g = g + l2 * before
        m_error = rounded((momentum, m, m_error), (share, g, g_error))
        m = momentum * m + share * g
        u = (momentum, m, m_error), (1.0, g, g_error)
        u_error = rounded(*u) if nesterov else m_error
        u = momentum * m + g if nesterov else m
        error = rounded((shrunk, before, error), (LR, u, u_error))
        optimizer.step()
        with torch.no_grad():
            exact.mul_(shrunk)
        twin.step()
        assert ((p.detach() - exact.detach()).abs() <= error).all(), f"step {t}"
    assert error.max() < LR / 50


def test_ademamix_float32_moments_follow_the_paper():
    """Algorithm 1 in float64 is the exact value.

    A term of an average rounds 3 times per step, so f and s are within gamma(3t) of the sums of
    their terms' magnitudes, F and S, and v, whose terms are positive, within gamma(4t) of itself.
    So the denominator d is within gamma(4t+3) of itself, the numerator within

        gamma(3t+3) (alpha S + F/(1-beta1^t)),

    and the ratio has one more rounding, and perhaps its bound's.  p rounds lr, decay, their
    products and the sum:

        e_t = decay (1 + gamma(3)) e_{t-1} + lr e_r + gamma(3) (decay |p| + lr |r|)
    """
    (beta1, beta2, _), alpha = (0.9, 0.999, 0.9999), 5.0
    group = {"lr": LR, "weight_decay": DECAY, "alpha": alpha, "t_alpha": 10, "t_beta3": 20}
    p = param(70, 90)
    exact = p.detach().double()
    optimizer = AdEMAMix8bitBlockwise([p], min_8bit_size=10**9, **group)
    f, s, v, f_size, s_size, error = (torch.zeros(70, 90).double() for _ in range(6))
    for t in range(1, 41):
        set_grads([p], t)
        g = p.grad.double()
        optimizer.step()
        beta3 = beta3_at(t, {**optimizer.defaults, **group})
        f, f_size = beta1 * f + (1 - beta1) * g, beta1 * f_size + (1 - beta1) * g.abs()
        s, s_size = beta3 * s + (1 - beta3) * g, beta3 * s_size + (1 - beta3) * g.abs()
        v = beta2 * v + (1 - beta2) * g * g
        d = (v / (1 - beta2**t)).sqrt() + 1e-8
        weight, correction = alpha * min(1, t / 10), 1 - beta1**t
        ratio = (f / correction + weight * s) / d
        size = (f_size / correction + weight * s_size) / d
        ratio_error = gamma(3 * t + 3) * size + gamma(4 * t + 5) * size
        decay = 1 - LR * DECAY
        error = decay * (1 + gamma(3)) * error + LR * ratio_error
        error += gamma(3) * (decay * exact.abs() + LR * size)
        exact = decay * exact - LR * ratio
        assert ((p.detach() - exact).abs() <= error).all(), f"step {t}"
    assert error.max() < LR / 50


def test_ademamix_beta3_comes_up_so_that_the_memory_grows_in_equal_steps():
    """1/ln(beta3), which is the memory, is linear in t between those of beta1 and beta3."""
    group = {"betas": (0.9, 0.999, 0.9999), "t_beta3": 100}
    memory = [1 / math.log(beta3_at(t, group)) for t in range(1, 101)]
    start, end = 1 / math.log(0.9), 1 / math.log(0.9999)
    for t, found in enumerate(memory, 1):
        assert found == pytest.approx(start + (end - start) * t / 100, rel=1e-9)
    assert beta3_at(101, group) == beta3_at(1, {**group, "t_beta3": None}) == 0.9999


ROUNDINGS = {"dither": Rounding.DITHER, "hash": Rounding.HASH, False: Rounding.NEAREST}


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


def moment_of(optimizer, p) -> torch.Tensor:
    return optimizer.moments(p)[0].read(0, p.numel()).view(p.shape)


long_lived = pytest.mark.parametrize(
    ("made", "beta"),
    [(SGD, 0.9), (SGD, 0.99), (ADAM, 0.98), (MIX, 0.99)],
)


@long_lived
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
    m = moment_of(optimizer, p)
    assert (m[:, 1:] == 0).all() and (m[:, 0] > 0.9).all()
