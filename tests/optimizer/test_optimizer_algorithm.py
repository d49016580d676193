# SPDX-License-Identifier: Apache-2.0
"""What the optimizer computes: AdamW's step, on moments that the reference defines."""

import pytest
import torch
from small_optimizers import assert_equal, gamma, param, required_by, run, set_grads, small_model
from torch import nn

from zero8 import Adam8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec import dither, reference
from zero8.spec.adam import ADAM, AdamScalars, next_history
from zero8.spec.codec import CODECS
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import packed, unpacked
from zero8.spec.segment import Moment, Rounding, Segment

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
codecs = pytest.mark.parametrize("codec", CODECS)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)], ids=str)
def test_optimizer_float32_moments_follow_adamw(betas, weight_decay):
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


@codecs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_optimizer_first_step_does_not_depend_on_the_codec(codec, dtype):
    """Moments are encoded after the update, and the first step starts from zeros.

    Rows are a block long, so that dithers of weights restart where those of float32 moments do.
    """
    quantized, plain = param(64, 256, dtype=dtype), param(64, 256, dtype=dtype)
    run(Adam8bitBlockwise([quantized], lr=0.1, codec=codec), [quantized], 1)
    run(Adam8bitBlockwise([plain], lr=0.1, min_8bit_size=10**9), [plain], 1)
    assert_equal([quantized], [plain])


@codecs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_optimizer_zero_gradients_never_move_parameters(codec, dtype):
    """Elements without gradient beside others in one block: exact zeros stay exact zeros."""
    p = param(16, 300, dtype=dtype)
    idle = torch.rand(16, 300, generator=torch.Generator().manual_seed(1)) < 0.5
    before = p.detach().clone()
    optimizer = Adam8bitBlockwise([p], lr=0.1, codec=codec)
    for step in range(20):
        set_grads([p], step)
        p.grad[idle] = -0.0 if step % 2 else 0.0
        optimizer.step()
        assert torch.equal(p[idle], before[idle])
        if step == 0:
            assert (p[~idle] != before[~idle]).all()
    for which in ("exp_avg", "exp_avg_sq"):
        code = CODECS[codec].code_of(ADAM.moment(which))
        stored = optimizer.state[p][f"{which}_q{code.bits}"].flatten()
        codes = unpacked(stored, BlockGrid.of((16, 300), 256), 0, 4800, code.bits).view(16, 300)
        assert (codes[idle] == code.zero_code).all()


@codecs
def test_optimizer_zero_gradients_with_weight_decay_follow_adamw_exactly(codec):
    """The update is then one product, p * (1 - lr * weight_decay), in both optimizers."""
    mine, theirs = param(64, 100), param(64, 100)
    optimizer = Adam8bitBlockwise([mine], lr=1e-2, weight_decay=0.3, codec=codec)
    adamw = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.3, foreach=False)
    for step in range(10):
        set_grads([mine], step)
        mine.grad[:, ::2] = 0.0
        theirs.grad = mine.grad.clone()
        optimizer.step()
        adamw.step()
        assert torch.equal(mine[:, ::2], theirs[:, ::2])


def test_optimizer_l2_adds_decay_to_the_gradient():
    """Exact sums of eighths: the same bits as without decay on the summed gradient."""
    mine, theirs = (nn.Parameter(torch.arange(6400.0).view(64, 100) / 8 - 400) for _ in range(2))
    mine.grad = torch.randint(-8, 9, (64, 100)) / 8
    theirs.grad = mine.grad + 0.5 * theirs.detach()
    Adam8bitBlockwise([mine], weight_decay=0.5, adam_w_mode=False).step()
    Adam8bitBlockwise([theirs]).step()
    assert_equal([mine], [theirs])


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_optimizer_maximize_equals_negated_gradients(optimizer_class):
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


@codecs
@pytest.mark.parametrize("rounding", ["dither", "hash", False], ids=str)
def test_optimizer_steps_are_those_of_the_reference(codec, rounding):
    """Scalars, phases and blocks as documented: keys from seed and name, phases from the step."""
    mine, theirs = param(20, 300, dtype=BF16), param(20, 300, dtype=BF16)
    keywords = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = Adam8bitBlockwise(
        [("layer.weight", mine)], codec=codec, seed=5, stochastic_rounding=rounding, **keywords
    )
    grid, identity = BlockGrid.of((20, 300), 256), dither.identity_of("layer.weight")
    stored = {}
    for which in ("exp_avg", "exp_avg_sq"):
        code = CODECS[codec].code_of(ADAM.moment(which))
        codes = torch.full((6000,), code.zero_code, dtype=torch.uint8)
        values = packed(codes, grid, 0, code.bits)
        stored[which] = Moment(values, torch.zeros(grid.num_blocks, *code.scale_shape))
    history = 0.0
    for step in range(1, 5):
        set_grads([mine], step)
        optimizer.step()
        history = next_history(history, 0.9, 0.99)
        keys = [dither.stream_key(5, identity, stream) for stream in ("exp_avg_sq", "param")]
        stored["exp_avg_sq"].phase, param_phase = (dither.phase_of(key, step) for key in keys)
        segment = Segment(
            param=theirs.detach().view(-1),
            grad=mine.grad.view(-1),
            algorithm=ADAM,
            moments=list(stored.values()),
            codec=CODECS[codec],
            grid=grid,
            first=0,
            scalars=AdamScalars.at(step, history, **keywords),
            param_phase=param_phase,
            rounding={"dither": Rounding.DITHER, "hash": Rounding.HASH}.get(rounding, 0),
        )
        assert reference.step(segment) == 0
        assert_equal([mine], [theirs])
        for which, moment in stored.items():
            state = optimizer.state[mine]
            bits = CODECS[codec].code_of(ADAM.moment(which)).bits
            assert torch.equal(state[f"{which}_q{bits}"].view(-1), moment.values)
            assert torch.equal(state[f"{which}_scale"].view(moment.scales.shape), moment.scales)
