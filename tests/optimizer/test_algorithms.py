# SPDX-License-Identifier: Apache-2.0
"""Optimizers beside Adam: steps as their papers and the reference define them, and states."""

import copy
import inspect
import math

import pytest
import torch
from nests import assert_same
from reference_twin import NAME, SEED, SHAPE, ReferenceTwin
from small_optimizers import (
    assert_equal,
    gamma,
    param,
    required_by,
    run,
    set_grads,
    small_model,
    through_file,
)
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.ademamix import beta3_at
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.codec import CODECS
from zero8.spec.segment import Rounding
from zero8.state.keywords import DEFAULTS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1
codecs = pytest.mark.parametrize("codec", CODECS)
ADAM, LION, SGD, MIX = (
    Adam8bitBlockwise,
    Lion8bitBlockwise,
    SGD8bitBlockwise,
    AdEMAMix8bitBlockwise,
)
OPTIONS = {
    ADAM: {"lr": LR, "betas": BETAS, "eps": 1e-6, "weight_decay": DECAY},
    LION: {"lr": LR, "betas": BETAS, "weight_decay": DECAY},
    SGD: {"lr": LR, "momentum": 0.9, "weight_decay": DECAY, "nesterov": True},
    MIX: {"lr": LR, "weight_decay": DECAY, "alpha": 2.0, "t_alpha": 4, "t_beta3": 8},
}
"""Keywords of each optimizer; SGD must be given a momentum."""
every = pytest.mark.parametrize("made", OPTIONS, ids=lambda one: one.algorithm.name)
one_moment = pytest.mark.parametrize("made", [LION, SGD], ids=lambda one: one.algorithm.name)


def entry_of(made) -> str:
    """Return the moment's entry in fp32 states."""
    return made.algorithm.moment_names[0]


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
    [(SGD, 0.9), (SGD, 0.99), (SGD, 0.999), (ADAM, 0.98), (ADAM, 0.99), (MIX, 0.99)],
)


@long_lived
def test_long_lived_moment_of_a_constant_gradient_comes_up_to_it(made, beta):
    """Nearest codes would stop where a step moves the average by less than half a code.

    Rounding is unbiased, so the mean error of N elements of one expectation is a martingale, to
    which the step that lies t back adds at most beta^t c/N for each element, c being a cell.  By
    Azuma's inequality it exceeds c sqrt(2 ln(2/P) / (N (1 - beta^2))) with probability P, here
    10^-9.  Cells at 0.1 of the largest element, y = 2.475, have 2/32 of the scale.
    """
    optimizer, p = averaging(made, beta, torch.zeros(64, 256))
    p.grad = torch.full((64, 256), 0.1)
    p.grad[:, 0] = 1.0
    steps, numel = round(3 / (1 - beta)), 64 * 255
    for _ in range(steps):
        optimizer.step()
    bound = 2 / 32 / 14.75 * (2 * 21.4 / (numel * (1 - beta**2))) ** 0.5
    assert bound < 0.015
    mean = float(moment_of(optimizer, p)[:, 1:].double().mean())
    assert abs(mean - 0.1 * (1 - beta**steps)) < bound


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


@every
@pytest.mark.parametrize("value", [math.nan, math.inf, -(2.0**63)])
def test_algorithm_gradient_that_is_not_finite_stops_its_block_only(made, value):
    p, other = param(4, 512), param(4, 512)
    optimizer, twin = made([p], **OPTIONS[made]), made([other], **OPTIONS[made])
    set_grads([p], 1)
    other.grad = p.grad.clone()
    p.grad[1, 300] = value
    before = p.detach().clone()
    with pytest.raises(FloatingPointError, match="1 blocks"):
        optimizer.step()
    twin.step()
    skipped = torch.zeros(4, 512, dtype=torch.bool)
    skipped[1, 256:] = True
    assert torch.equal(p[skipped], before[skipped])
    assert torch.equal(p[~skipped], other[~skipped])


# --- States --------------------------------------------------------------------------------------


@every
def test_algorithm_state_has_its_bytes(made):
    p = param(64, 512)
    algorithm, optimizer = made.algorithm, made([("w", p)], **OPTIONS[made])
    run(optimizer, [p], 2)
    state = optimizer.state[p]
    moments = [f"{name}{kind}" for name in algorithm.moment_names for kind in ("_q8", "_scale")]
    memory = [one.name for one in algorithm.memory]
    assert sorted(state) == sorted(["format", "step", *memory, *moments])
    assert state["format"].tolist()[:2] == [1, algorithm.number]
    (row,) = optimizer.memory_report().rows
    scales = {ADAM: 3, MIX: 4}.get(made, 1)  # v has two
    assert row.state_bytes == len(algorithm.moments) * 64 * 512 + 4 * scales * 64 * 2


@every
@codecs
@pytest.mark.parametrize("form", ["8bit", "fp32"])
def test_algorithm_state_dict_through_a_file_continues_with_the_same_bits(made, codec, form):
    p = param(20, 300, dtype=FP32)
    optimizer = made([("w", p)], codec=codec, state_dict_format=form, **OPTIONS[made])
    run(optimizer, [p], 3)
    saved = optimizer.state_dict()
    q = nn.Parameter(p.detach().clone())
    other = made([("w", q)], codec=codec, **OPTIONS[made])
    other.load_state_dict(through_file(saved))
    if form == "fp32" and made.algorithm.memory:  # the bounds of its updates are forgotten
        for mine, theirs in zip(optimizer.moments(p), other.moments(q), strict=True):
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scales, theirs.scales)
        return
    run(optimizer, [p], 3, start=3)
    run(other, [q], 3, start=3)
    assert_equal([p], [q])


@one_moment
def test_one_moment_of_another_library_loads_without_a_step(made):
    """The states of the usual Lion and of torch's SGD are their moments alone."""
    p = param(20, 300)
    moment = param(20, 300, seed=1).detach()
    group = {"params": [0], **OPTIONS[made], "lr": 3e-4}
    optimizer = made([p], **OPTIONS[made])
    optimizer.load_state_dict({"state": {0: {entry_of(made): moment}}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == (1 if made is SGD else 0)
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert (moment_of(optimizer, p) - moment).abs().max() < 0.04 * moment.abs().max()
    run(optimizer, [p], 1)


def test_sgd_states_of_torch_go_in_and_out():
    """With dampening, which torch leaves out in the first step only."""
    options = {"lr": LR, "momentum": 0.9, "dampening": 0.5}
    theirs, ours = param(20, 300), param(20, 300)
    of_torch = torch.optim.SGD([theirs], **options)
    run(of_torch, [theirs], 2)
    ours.data.copy_(theirs)
    optimizer = SGD8bitBlockwise([ours], min_8bit_size=10**9, **options)
    optimizer.load_state_dict(of_torch.state_dict())
    for one, p in ((of_torch, theirs), (optimizer, ours)):
        run(one, [p], 2, start=2)
    assert torch.allclose(theirs, ours, rtol=1e-6, atol=1e-7)
    back = torch.optim.SGD([nn.Parameter(ours.detach().clone())], **options)
    back.load_state_dict(copy.deepcopy(zero8.export(optimizer)))
    (p,) = back.param_groups[0]["params"]
    for one, q in ((optimizer, ours), (back, p)):
        run(one, [q], 2, start=4)
    assert torch.allclose(p, ours, rtol=1e-6, atol=1e-7)


def states_of(optimizer_class, **keywords):
    p = param(20, 300)
    optimizer = optimizer_class([p], **OPTIONS.get(optimizer_class, {}) | keywords)
    run(optimizer, [p], 1)
    return optimizer.state_dict()


FOREIGN = {
    "Lion from Adam": (LION, states_of, Adam8bitBlockwise, "one of Adam8bitBlockwise"),
    "Adam from Lion": (Adam8bitBlockwise, states_of, LION, "one of Lion8bitBlockwise"),
    "SGD from Lion": (SGD, states_of, LION, "one of Lion8bitBlockwise"),
    "Lion from AdamW": (LION, states_of, torch.optim.AdamW, "one of an fp32 Adam"),
    "AdEMAMix from Adam": (MIX, states_of, Adam8bitBlockwise, "betas: got .* three numbers"),
    "Adam from AdEMAMix": (Adam8bitBlockwise, states_of, MIX, "betas: got .* two numbers"),
    "Lion from AdEMAMix": (LION, states_of, MIX, "betas: got .* two numbers"),
    "SGD from AdamW": (SGD, states_of, torch.optim.AdamW, r"without \['momentum_buffer'\]"),
    "Adam from an fp32 Lion": (
        Adam8bitBlockwise,
        lambda lion: states_of(lion, state_dict_format="fp32"),
        LION,
        r"without \['exp_avg_sq'\]",
    ),
}


@pytest.mark.parametrize(("ours", "make", "theirs", "message"), FOREIGN.values(), ids=FOREIGN)
def test_states_of_other_algorithms_are_refused(ours, make, theirs, message):
    p = param(20, 300)
    optimizer = ours([p], **OPTIONS.get(ours, {}))
    run(optimizer, [p], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make(theirs))
    assert_same(optimizer.state_dict()["state"], before["state"])


@every
def test_algorithm_is_refused_by_other_optimizers_and_exported_for_them(made):
    state_dict, name = states_of(made), made.__name__
    with pytest.raises(ValueError, match=f"states of zero8's {name}, which AdamW"):
        torch.optim.AdamW([param(20, 300)]).load_state_dict(state_dict)
    p = param(20, 300)
    optimizer = made([p], **OPTIONS[made])
    run(optimizer, [p], 1)
    exported = zero8.export(optimizer)["state"][0]
    assert sorted(exported) == sorted([*made.algorithm.moment_names, "step"])
    assert exported[entry_of(made)].dtype == FP32


# --- Keywords ------------------------------------------------------------------------------------


NOT_THEIR_OWN = [
    (made, key)
    for made in OPTIONS
    for key in ("eps", "bias_correction", "adam_w_mode", "betas2")
    if key not in made.algorithm.keywords
]


def test_hint_names_no_keyword_that_the_optimizer_lacks():
    with pytest.raises(ValueError, match="unknown parameter 'beta1' for SGD8bit") as raised:
        SGD8bitBlockwise([param(4, 4)], momentum=0.9, beta1=0.9)
    assert "betas" not in str(raised.value)


@pytest.mark.parametrize(("made", "key"), NOT_THEIR_OWN)
def test_keyword_that_is_not_its_own_is_refused_with_those_that_are(made, key):
    known = {ADAM: "eps", LION: "betas", SGD: "dampening", MIX: "alpha"}[made]
    with pytest.raises(ValueError, match=f"unknown parameter '{key}' for {made.__name__}.*{known}"):
        made([param(4, 4)], **OPTIONS[made], **{key: True})


BAD = {
    "no momentum": (SGD, {}, r"momentum: got 0\.0, expected .* use torch.optim.SGD"),
    "momentum 1": (SGD, {"momentum": 1.0}, r"momentum: got 1\.0, expected a number above 0 and"),
    "dampening": (SGD, {"dampening": 1.5}, r"dampening: got 1\.5, expected at most 1"),
    "nesterov": (SGD, {"dampening": 0.5, "nesterov": True}, "nesterov: got true with a dampening"),
    "flag": (SGD, {"nesterov": 1}, "nesterov: got 1, expected true or false"),
    "two betas": (MIX, {"betas": (0.9, 0.999)}, "betas: got .*, expected three numbers, such as"),
    "alpha": (MIX, {"alpha": -1.0}, r"alpha: got -1\.0, expected at least 0"),
    "schedule": (MIX, {"betas": (0.0, 0.9, 0.99), "t_beta3": 5}, "t_beta3: got 5 .*beta1 above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_option_that_is_invalid_is_refused(name):
    made, options, message = BAD[name]
    momentum = {"momentum": 0.9} if made is SGD and name != "no momentum" else {}
    with pytest.raises(ValueError, match=message):
        made([param(4, 4)], **momentum | options)


def test_lion_settings_have_the_defaults_of_adam():
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert {key: parameters[key].default for key in DEFAULTS} == DEFAULTS


def test_every_algorithm_has_an_optimizer_that_torch_knows():
    assert [one.algorithm for one in OPTIMIZERS] == list(ALGORITHMS)
    for one in OPTIMIZERS:
        assert one.__name__ == one.algorithm.class_name
        assert getattr(torch.optim, one.__name__) is getattr(zero8, one.__name__) is one
