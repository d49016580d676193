# SPDX-License-Identifier: Apache-2.0
"""Optimizers with one moment, Lion and SGD: steps as the reference defines them, and states."""

import copy
import inspect
import math

import pytest
import torch
from small_optimizers import assert_equal, gamma, param, run, set_grads
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.algorithms.table import ALGORITHMS
from zero8.optimizer import OPTIMIZERS
from zero8.spec import dither, reference
from zero8.spec.codec import CODECS
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Moment, Rounding, Segment
from zero8.state.keywords import DEFAULTS, OWN_KEYS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1
codecs = pytest.mark.parametrize("codec", CODECS)
LION, SGD = Lion8bitBlockwise, SGD8bitBlockwise
OPTIONS = {
    LION: {"lr": LR, "betas": BETAS, "weight_decay": DECAY},
    SGD: {"lr": LR, "momentum": 0.9, "weight_decay": DECAY, "nesterov": True},
}
"""Keywords of each optimizer; SGD must be given a momentum."""
both = pytest.mark.parametrize("made", OPTIONS, ids=lambda one: one.algorithm.name)


def entry_of(made) -> str:
    """Return the moment's entry in fp32 states."""
    return made.algorithm.moment_names[0]


# --- The step ------------------------------------------------------------------------------------


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


@both
@codecs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_one_moment_steps_are_those_of_the_reference(made, codec, dtype):
    """Scalars, phases and blocks as documented: keys from seed and name, phases from the step."""
    mine, theirs = param(20, 300, dtype=dtype), param(20, 300, dtype=dtype)
    algorithm, name = made.algorithm, entry_of(made)
    optimizer = made([("layer.weight", mine)], codec=codec, seed=5, **OPTIONS[made])
    grid, identity = BlockGrid.of((20, 300), 256), dither.identity_of("layer.weight")
    code = CODECS[codec].code_of(algorithm.moments[0])
    codes = torch.full((6000,), code.zero_code, dtype=torch.uint8)
    moment = Moment(codes, torch.zeros(grid.num_blocks, *code.scale_shape))
    for step in range(1, 6):
        set_grads([mine], step)
        optimizer.step()
        keys = [dither.stream_key(5, identity, stream) for stream in (name, "param")]
        moment.phase, param_phase = (dither.phase_of(key, step) for key in keys)
        segment = Segment(
            param=theirs.detach().view(-1),
            grad=mine.grad.view(-1),
            algorithm=algorithm,
            moments=[moment],
            codec=CODECS[codec],
            grid=grid,
            first=0,
            scalars=algorithm.scalars(step, (), {**algorithm.options, **OPTIONS[made]}, True),
            param_phase=param_phase,
            rounding=Rounding.DITHER,
        )
        assert reference.step(segment) == 0
        assert_equal([mine], [theirs])
        state = optimizer.state[mine]
        assert torch.equal(state[f"{name}_q8"].view(-1), moment.values)
        assert torch.equal(state[f"{name}_scale"].view(moment.scales.shape), moment.scales)


@both
@codecs
def test_one_moment_zero_gradients_never_move_parameters(made, codec):
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
            assert made is SGD or ((p - before).abs()[~idle] - 0.1).abs().max() < 1e-6


def averaging(beta: float, start: torch.Tensor):
    """Return an SGD whose moment is a moving average of gradients from `start` on, and its p."""
    p = nn.Parameter(torch.zeros_like(start))
    optimizer = SGD8bitBlockwise([p], lr=0.0, momentum=beta, dampening=beta)
    p.grad = start.clone()
    optimizer.step()  # the first one has no dampening
    return optimizer, p


def moment_of(optimizer, p) -> torch.Tensor:
    (store,) = optimizer.moments(p)
    return store.read(0, p.numel()).view(p.shape)


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_long_lived_moment_of_a_constant_gradient_comes_up_to_it(beta):
    """Nearest codes would stop where a step moves the average by less than half a code.

    Rounding is unbiased, so the mean error of N elements of one expectation is a martingale, to
    which the step that lies t back adds at most beta^t c/N for each element, c being a cell.  By
    Azuma's inequality it exceeds c sqrt(2 ln(2/P) / (N (1 - beta^2))) with probability P, here
    10^-9.  Cells at 0.1 of the largest element, y = 2.475, have 2/32 of the scale.
    """
    optimizer, p = averaging(beta, torch.zeros(64, 256))
    p.grad = torch.full((64, 256), 0.1)
    p.grad[:, 0] = 1.0
    steps, numel = round(3 / (1 - beta)), 64 * 255
    for _ in range(steps):
        optimizer.step()
    bound = 2 / 32 / 14.75 * (2 * 21.4 / (numel * (1 - beta**2))) ** 0.5
    assert bound < 0.015
    mean = float(moment_of(optimizer, p)[:, 1:].double().mean())
    assert abs(mean - 0.1 * (1 - beta**steps)) < bound


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_long_lived_moment_whose_gradient_has_ended_reaches_zero(beta):
    """The mean of an element after T steps is beta^T of its value; what is not 0 is 1/32 s at
    least.  So of 4,080 elements of up to 14.75 s one is left with probability 4,080 * 472 * e^-35.
    """
    start = torch.rand(16, 256, generator=torch.Generator().manual_seed(2)) - 0.5
    optimizer, p = averaging(beta, start)
    p.grad = torch.zeros(16, 256)
    p.grad[:, 0] = 1.0  # the largest of each block lives on, and the scale with it
    for _ in range(round(35 / (1 - beta))):
        optimizer.step()
    m = moment_of(optimizer, p)
    assert (m[:, 1:] == 0).all() and (m[:, 0] > 0.9).all()


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, -(2.0**63)])
def test_one_moment_gradient_that_is_not_finite_stops_its_block_only(made, value):
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


@both
def test_one_moment_state_has_its_bytes(made):
    p = param(64, 512)
    optimizer, name = made([("w", p)], **OPTIONS[made]), entry_of(made)
    run(optimizer, [p], 2)
    state = optimizer.state[p]
    assert sorted(state) == sorted(["format", "step", f"{name}_q8", f"{name}_scale"])
    assert state["format"].tolist()[:4] == [3, made.algorithm.number, 4, 256]
    (row,) = optimizer.memory_report().rows
    assert (row.bits, row.state_bytes) == (8, 64 * 512 + 4 * 64 * 2)


@both
@codecs
@pytest.mark.parametrize("form", ["8bit", "fp32"])
def test_one_moment_state_dict_through_a_file_continues_with_the_same_bits(
    made, codec, form, tmp_path
):
    p = param(20, 300, dtype=FP32)
    optimizer = made([("w", p)], codec=codec, state_dict_format=form, **OPTIONS[made])
    run(optimizer, [p], 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    q = nn.Parameter(p.detach().clone())
    other = made([("w", q)], codec=codec, **OPTIONS[made])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(optimizer, [p], 3, start=3)
    run(other, [q], 3, start=3)
    assert_equal([p], [q])


@both
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
    after = optimizer.state_dict()["state"][0]
    assert all(
        torch.equal(torch.as_tensor(after[k]), torch.as_tensor(v))
        for k, v in before["state"][0].items()
    )


@both
def test_one_moment_is_refused_by_other_optimizers_and_exported_for_them(made):
    state_dict, name = states_of(made), made.__name__
    with pytest.raises(ValueError, match=f"states of zero8's {name}, which AdamW"):
        torch.optim.AdamW([param(20, 300)]).load_state_dict(state_dict)
    p = param(20, 300)
    optimizer = made([p], **OPTIONS[made])
    run(optimizer, [p], 1)
    exported = zero8.export(optimizer)["state"][0]
    assert sorted(exported) == sorted([entry_of(made), "step"])
    assert exported[entry_of(made)].dtype == FP32


# --- Keywords ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("key", ["eps", "bias_correction", "adam_w_mode", "betas2"])
def test_keyword_that_is_not_its_own_is_refused_with_those_that_are(made, key):
    known = "betas" if made is LION else "dampening"
    with pytest.raises(ValueError, match=f"unknown parameter '{key}' for {made.__name__}.*{known}"):
        made([param(4, 4)], **OPTIONS[made], **{key: True})


BAD_SGDS = {
    "no momentum": ({}, r"momentum: got 0\.0, expected .* use torch.optim.SGD"),
    "momentum 1": ({"momentum": 1.0}, r"momentum: got 1\.0, expected a number above 0 and below 1"),
    "dampening": ({"momentum": 0.9, "dampening": 1.5}, r"dampening: got 1\.5, expected at most 1"),
    "nesterov": (
        {"momentum": 0.9, "dampening": 0.5, "nesterov": True},
        r"nesterov: got true with a dampening of 0\.5",
    ),
    "flag": ({"momentum": 0.9, "nesterov": 1}, "nesterov: got 1, expected true or false"),
}


@pytest.mark.parametrize(("options", "message"), BAD_SGDS.values(), ids=BAD_SGDS)
def test_sgd_option_that_is_invalid_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SGD8bitBlockwise([param(4, 4)], **options)


def test_lion_settings_have_the_defaults_of_adam():
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert {key: parameters[key].default for key in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) == {*OWN_KEYS, "bias_correction"}


def test_every_algorithm_has_an_optimizer_that_torch_knows():
    assert [one.algorithm for one in OPTIMIZERS] == list(ALGORITHMS)
    for one in OPTIMIZERS:
        assert one.__name__ == one.algorithm.class_name
        assert getattr(torch.optim, one.__name__) is getattr(zero8, one.__name__) is one
