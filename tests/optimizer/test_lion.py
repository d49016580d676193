# SPDX-License-Identifier: Apache-2.0
"""Lion8bitBlockwise: Lion's step, on a moment that the reference defines, and its states."""

import copy
import inspect
import math

import pytest
import torch
from small_optimizers import assert_equal, gamma, param, run, set_grads
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, Lion8bitBlockwise
from zero8.algorithms.lion import LION
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


@codecs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_lion_steps_are_those_of_the_reference(codec, dtype):
    """Scalars, phases and blocks as documented: keys from seed and name, phases from the step."""
    mine, theirs = param(20, 300, dtype=dtype), param(20, 300, dtype=dtype)
    group = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "maximize": False}
    optimizer = Lion8bitBlockwise([("layer.weight", mine)], codec=codec, seed=5, **group)
    grid, identity = BlockGrid.of((20, 300), 256), dither.identity_of("layer.weight")
    code = CODECS[codec].of_signed
    codes = torch.full((6000,), code.zero_code, dtype=torch.uint8)
    moment = Moment(codes, torch.zeros(grid.num_blocks, *code.scale_shape))
    for step in range(1, 6):
        set_grads([mine], step)
        optimizer.step()
        keys = [dither.stream_key(5, identity, stream) for stream in ("exp_avg", "param")]
        moment.phase, param_phase = (dither.phase_of(key, step) for key in keys)
        segment = Segment(
            param=theirs.detach().view(-1),
            grad=mine.grad.view(-1),
            algorithm=LION,
            moments=[moment],
            codec=CODECS[codec],
            grid=grid,
            first=0,
            scalars=LION.scalars(step, (), group, True),
            param_phase=param_phase,
            rounding=Rounding.DITHER,
        )
        assert reference.step(segment) == 0
        assert_equal([mine], [theirs])
        state = optimizer.state[mine]
        assert torch.equal(state["exp_avg_q8"].view(-1), moment.values)
        assert torch.equal(state["exp_avg_scale"].view(moment.scales.shape), moment.scales)


@codecs
def test_lion_zero_gradients_never_move_parameters(codec):
    p = param(16, 300)
    idle = torch.rand(16, 300, generator=torch.Generator().manual_seed(1)) < 0.5
    before = p.detach().clone()
    optimizer = Lion8bitBlockwise([p], lr=0.1, codec=codec)
    for step in range(10):
        set_grads([p], step)
        p.grad[idle] = -0.0 if step % 2 else 0.0
        optimizer.step()
        assert torch.equal(p[idle], before[idle])
        if step == 0:
            assert ((p - before).abs()[~idle] - 0.1).abs().max() < 1e-6


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999])
def test_lion_moment_whose_gradient_has_ended_decays_to_zero(beta2):
    """Each step takes a code down by one at least (C2'), so 127 steps take all to zero."""
    p = param(8, 512)
    optimizer = Lion8bitBlockwise([p], betas=(0.9, beta2), codec="log")
    run(optimizer, [p], 3)
    p.grad = torch.zeros(8, 512)
    p.grad[:, ::2] = 1.0  # the largest of each block lives on, and the scale with it
    for _ in range(127):
        optimizer.step()
    codes = optimizer.state[p]["exp_avg_q8"].view(torch.int8)
    assert (codes[:, 1::2] == 0).all() and (codes[:, ::2] > 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -(2.0**63)])
def test_lion_gradient_that_is_not_finite_stops_its_block_only(value):
    p, other = param(4, 512), param(4, 512)
    optimizer, twin = Lion8bitBlockwise([p]), Lion8bitBlockwise([other])
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


def test_lion_state_has_one_moment_and_its_bytes():
    p = param(64, 512)
    optimizer = Lion8bitBlockwise([("w", p)])
    run(optimizer, [p], 2)
    state = optimizer.state[p]
    assert sorted(state) == ["exp_avg_q8", "exp_avg_scale", "format", "step"]
    assert state["format"].tolist()[:4] == [3, LION.number, 4, 256]
    (row,) = optimizer.memory_report().rows
    assert (row.bits, row.state_bytes) == (8, 64 * 512 + 4 * 64 * 2)


@codecs
@pytest.mark.parametrize("form", ["8bit", "fp32"])
def test_lion_state_dict_through_a_file_continues_with_the_same_bits(codec, form, tmp_path):
    p = param(20, 300, dtype=FP32)
    optimizer = Lion8bitBlockwise([("w", p)], codec=codec, state_dict_format=form)
    run(optimizer, [p], 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    q = nn.Parameter(p.detach().clone())
    other = Lion8bitBlockwise([("w", q)], codec=codec)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(optimizer, [p], 3, start=3)
    run(other, [q], 3, start=3)
    assert_equal([p], [q])


def test_lion_of_another_library_loads_without_a_step():
    """The state of the usual Lion is its moment alone."""
    p = param(20, 300)
    moment = param(20, 300, seed=1).detach()
    group = {"params": [0], "lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.5}
    optimizer = Lion8bitBlockwise([p])
    optimizer.load_state_dict({"state": {0: {"exp_avg": moment}}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == 0 and optimizer.param_groups[0]["lr"] == 3e-4
    (store,) = optimizer.moments(p)
    assert (store.read(0, 6000).view(20, 300) - moment).abs().max() < 0.04 * moment.abs().max()
    run(optimizer, [p], 1)


def states_of(optimizer_class, **keywords):
    p = param(20, 300)
    optimizer = optimizer_class([p], **keywords)
    run(optimizer, [p], 1)
    return optimizer.state_dict()


FOREIGN = {
    "Lion from Adam": (Lion8bitBlockwise, states_of, Adam8bitBlockwise, "one of Adam8bitBlockwise"),
    "Adam from Lion": (Adam8bitBlockwise, states_of, Lion8bitBlockwise, "one of Lion8bitBlockwise"),
    "Lion from AdamW": (Lion8bitBlockwise, states_of, torch.optim.AdamW, "one of an fp32 Adam"),
    "Adam from an fp32 Lion": (
        Adam8bitBlockwise,
        lambda lion: states_of(lion, state_dict_format="fp32"),
        Lion8bitBlockwise,
        r"without \['exp_avg_sq'\]",
    ),
}


@pytest.mark.parametrize(("ours", "make", "theirs", "message"), FOREIGN.values(), ids=FOREIGN)
def test_lion_states_and_others_refuse_each_other(ours, make, theirs, message):
    p = param(20, 300)
    optimizer = ours([p])
    run(optimizer, [p], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make(theirs))
    after = optimizer.state_dict()["state"][0]
    assert all(
        torch.equal(torch.as_tensor(after[k]), torch.as_tensor(v))
        for k, v in before["state"][0].items()
    )


def test_lion_is_refused_by_other_optimizers_and_exported_for_them():
    state_dict = states_of(Lion8bitBlockwise)
    with pytest.raises(ValueError, match="states of zero8's Lion8bitBlockwise, which AdamW"):
        torch.optim.AdamW([param(20, 300)]).load_state_dict(state_dict)
    p = param(20, 300)
    optimizer = Lion8bitBlockwise([p])
    run(optimizer, [p], 1)
    exported = zero8.export(optimizer)["state"][0]
    assert sorted(exported) == ["exp_avg", "step"] and exported["exp_avg"].dtype == FP32


# --- Keywords ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["eps", "bias_correction", "adam_w_mode", "betas2"])
def test_lion_keyword_that_is_not_its_own_is_refused_with_those_that_are(key):
    with pytest.raises(ValueError, match=f"unknown parameter '{key}' for Lion8bitBlockwise.*betas"):
        Lion8bitBlockwise([param(4, 4)], **{key: True})


def test_lion_settings_have_the_defaults_of_adam():
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert {key: parameters[key].default for key in DEFAULTS} == DEFAULTS
    assert set(DEFAULTS) == {*OWN_KEYS, "bias_correction"}


def test_every_algorithm_has_an_optimizer_that_torch_knows():
    assert [one.algorithm for one in OPTIMIZERS] == list(ALGORITHMS)
    for one in OPTIMIZERS:
        assert one.__name__ == one.algorithm.class_name
        assert getattr(torch.optim, one.__name__) is getattr(zero8, one.__name__) is one
