# SPDX-License-Identifier: Apache-2.0
"""Muon on plain tensors: its steps, which parameters it takes, its states, and what it refuses."""

import copy
import math
import pickle

import newton_schulz
import numpy as np
import pytest
import torch
from nests import assert_same
from reference_twin import NAME, SEED, SHAPE, ReferenceTwin
from small_optimizers import assert_equal, gamma, param, set_grads, through_file
from torch import nn

from zero8 import Adam8bitBlockwise, StableEmbedding
from zero8.optimizer.clipping import factor_of
from zero8.optimizer.muon import Muon8bitBlockwise
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.spec.muon import MUON
from zero8.spec.segment import Rounding

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
EXACT = {"ns_dtype": "float32", "adjust_lr_fn": "original"}
codecs = pytest.mark.parametrize("codec", CODECS)
nesterovs = pytest.mark.parametrize("nesterov", [True, False])


def muon(*params: nn.Parameter, **keywords) -> Muon8bitBlockwise:
    """Return an optimizer of matrices called 0, 1, ..."""
    return Muon8bitBlockwise(
        [(str(number), p) for number, p in enumerate(params)], **{"lr": 0.01, **EXACT, **keywords}
    )


def run(optimizer, params, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        set_grads(params, step)
        optimizer.step()


def codes_of(optimizer, p) -> dict[str, torch.Tensor]:
    """Return the entries of a moment."""
    return {k: v for k, v in optimizer.state[p].items() if k.startswith("momentum_buffer")}


# --- The step ------------------------------------------------------------------------------------


@nesterovs
@pytest.mark.parametrize("shape", [(4, 12), (12, 4)], ids=["wide", "tall"])
def test_muon_float32_moments_follow_float64(shape, nesterov):
    """Keller Jordan's Muon in float64, written here, is the exact value.

    m = sum a_i g_i: a term rounds 3 times per step (constant, product, sum), so m is within
    gamma(3t) M, where M = sum a_i |g_i|; and u, of three roundings more, within

        d = gamma(3t + 3) U,   U = momentum M + (1-momentum) |g|   or M without Nesterov.

    `newton_schulz.with_bound` makes of |d| a bound o on O.  p has rounded lr, decay, their products
    and the sum, and so with size = lr ratio:

        e_t = decay (1 + gamma(3)) e_{t-1} + size o + gamma(3) (decay |p| + size (|O| + o))
    """
    lr, momentum, weight_decay = 0.02, 0.9, 0.1
    p = param(*shape)
    keywords = {"momentum": momentum, "weight_decay": weight_decay, "fp32_params": ["*"]}
    optimizer = muon(p, lr=lr, nesterov=nesterov, **keywords)
    exact = p.detach().double().numpy()
    m, absolute, error = (np.zeros(shape) for _ in range(3))
    size, decay = lr * math.sqrt(max(1, shape[0] / shape[1])), 1 - lr * weight_decay
    for t in range(1, 5):
        set_grads([p], t)
        g = p.grad.double().numpy()
        optimizer.step()
        m = m + (1 - momentum) * (g - m)
        absolute = momentum * absolute + (1 - momentum) * np.abs(g)
        u, u_size = m, absolute
        if nesterov:
            u = g + momentum * (m - g)
            u_size = momentum * absolute + (1 - momentum) * np.abs(g)
        u_error = float(np.linalg.norm(gamma(3 * t + 4) * u_size))
        o, o_error = newton_schulz.with_bound(u, u_error)
        error = decay * (1 + gamma(4)) * error + size * o_error
        error += gamma(4) * (decay * np.abs(exact) + size * (np.abs(o) + o_error))
        exact = decay * exact - size * o
        assert (np.abs(p.detach().double().numpy() - exact) <= error).all(), f"step {t}"
    assert error.max() < lr / 5  # the bound is below one update, whose norm is about lr sqrt(8)
    found = optimizer.state[p]["momentum_buffer"].double().numpy()
    assert (np.abs(found - m) <= gamma(3 * 4 + 1) * absolute).all()


@codecs
@nesterovs
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_muon_momentum_has_the_bits_of_the_reference(codec, nesterov, dtype):
    """(O1) with the key of its name; what the reference does to a parameter is not Muon's."""
    p, twin = param(*SHAPE, dtype=dtype), ReferenceTwin(MUON, codec)
    settings = {"codec": codec, "seed": SEED, "nesterov": nesterov, "momentum": 0.9}
    optimizer = Muon8bitBlockwise([(NAME, p)], **settings)
    for step in range(1, 5):
        set_grads([p], step)
        optimizer.step()
        unused = torch.zeros(SHAPE)
        twin.step(step, unused, p.grad, optimizer.param_groups[0], Rounding.NEAREST)
        twin.assert_is(optimizer.state[p])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_muon_steps_other_parameters_as_adamw(dtype):
    shapes = {"embed_tokens.weight": (40, 300), "bias": (5000,), "norm": (17,)}
    mine = {name: param(*shape, dtype=dtype) for name, shape in shapes.items()}
    theirs = {name: param(*shape, dtype=dtype) for name, shape in shapes.items()}
    matrix = param(30, 300, dtype=dtype)
    keywords = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.2, "seed": 3}
    ours = Muon8bitBlockwise([*mine.items(), ("matrix", matrix)], **keywords)
    adam = Adam8bitBlockwise(list(theirs.items()), **keywords)
    for step in range(4):
        set_grads([*mine.values(), matrix], step)
        set_grads(theirs.values(), step)
        ours.step()
        adam.step()
    assert_equal(mine.values(), theirs.values())
    for name in shapes:
        assert_same(ours.state[mine[name]], adam.state[theirs[name]])


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)], ids=["wide", "tall"])
def test_muon_learning_rates_have_the_ratio_of_adjust_lr_fn(shape):
    """From zeros a step is one product; with an lr of 1 and a ratio of 1 or 2 it is exact."""
    found = {}
    for adjust_lr_fn in ("original", "match_rms_adamw", None):
        p = nn.Parameter(torch.zeros(shape))
        run(muon(p, lr=1.0, adjust_lr_fn=adjust_lr_fn), [p], 1)
        found[adjust_lr_fn] = p.detach()
    assert torch.equal(found[None], found["original"])
    direction = found["original"] / math.sqrt(max(1, shape[0] / shape[1]))
    assert 0.5 < direction.norm() / math.sqrt(min(shape)) < 1.2025  # the mean of singular values
    assert torch.equal(found["match_rms_adamw"], torch.tensor(0.2 * math.sqrt(256)) * direction)


def difference_bound(optimizer, p, matrices: int) -> float:
    """Return how far two orthogonalizations in float32 of the next u can be apart, times lr.

    Each is within the bound from the exact one; u, computed here in float64, has 6 roundings there.
    """
    g = p.grad.double().numpy()
    momentum, lr = optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["lr"]
    before = np.zeros(g.shape)
    if optimizer.state[p]:
        (store,) = optimizer.moments(p)
        before = store.read(0, p.numel()).view(p.shape).double().numpy()
    u = momentum * (momentum * before + (1 - momentum) * g) + (1 - momentum) * g
    size = np.abs(momentum**2 * before) + np.abs((1 - momentum**2) * g)
    bounds = []
    for one, one_size in zip(*(x.reshape(matrices, -1) for x in (u, size)), strict=True):
        rows = p.shape[1] if matrices > 1 else p.shape[0]
        one = one.reshape(rows, -1)
        error = float(np.linalg.norm(gamma(6) * one_size))
        ratio = math.sqrt(max(1, one.shape[0] / one.shape[1]))
        # Two more roundings each, of the product and of the weight, which is below 8.
        bounds.append(2 * lr * ratio * newton_schulz.with_bound(one, error)[1] + 16 * gamma(2))
    return max(bounds)


def test_muon_experts_step_as_the_matrices_one_by_one():
    """The same momentum where rows are the same blocks, and weights that differ by roundings."""
    stacked = param(3, 4, 12)
    singles = [nn.Parameter(one.clone()) for one in stacked.detach()]
    settings = {"fp32_params": ["*"], "weight_decay": 0.0}
    together, apart = muon(stacked, **settings), muon(*singles, **settings)
    bound = 0.0
    for step in range(3):
        set_grads([stacked], step)
        for p, g in zip(singles, stacked.grad, strict=True):
            p.grad = g.clone()
        bound += difference_bound(together, stacked, 3)
        together.step()
        apart.step()
        for number, p in enumerate(singles):
            m, alone = together.state[stacked]["momentum_buffer"][number], apart.state[p]
            assert torch.equal(m, alone["momentum_buffer"])
            assert (stacked[number] - p).abs().max() <= bound
    assert bound < 0.01 / 5


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_muon_chunks_of_equal_shapes_take_the_steps_of_each_alone(dtype):
    """Momentum to the bit; the gradients do not depend on the weights."""
    params = [param(16, 256, seed=n, dtype=dtype) for n in range(4)]
    together = muon(*params)
    run(together, params, 2)
    for number in range(4):
        q = param(16, 256, seed=number, dtype=dtype)
        alone = Muon8bitBlockwise([(str(number), q)], lr=0.01, **EXACT)
        for step in range(2):
            generator = torch.Generator().manual_seed(1000 * step + number)
            q.grad = torch.randn(q.shape, generator=generator).to(dtype)
            alone.step()
        assert_same(codes_of(together, params[number]), codes_of(alone, q))


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=str)
def test_muon_clipping_rounds_to_the_wider_type_of_weight_and_gradient(dtypes, ns_dtype):
    """Whatever dtype the orthogonalization has, which depends on the processor."""
    of_weight, of_grad = dtypes
    ours, theirs = param(64, 96, dtype=of_weight), param(64, 96, dtype=of_weight)
    ours.grad_dtype = of_grad
    clipping, plain = muon(ours, ns_dtype=ns_dtype), muon(theirs, ns_dtype=ns_dtype)
    for step in range(3):
        g = torch.randn(64, 96, generator=torch.Generator().manual_seed(step)).to(of_grad)
        ours.grad = g.clone()
        norm = clipping.clip_grad_norm_(0.3)
        theirs.grad = (g.float() * factor_of(0.3, norm)).to(of_weight)
        clipping.step(), plain.step()
        assert torch.equal(ours, theirs)
    assert_same(codes_of(clipping, ours), codes_of(plain, theirs))


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_muon_steps_inside_autocast_are_those_outside(ns_dtype):
    inside, outside = ([param(16, 256), param(4, 8, 256)] for _ in range(2))
    autocast, plain = muon(*inside, ns_dtype=ns_dtype), muon(*outside, ns_dtype=ns_dtype)
    for step in range(2):
        set_grads(inside, step), set_grads(outside, step)
        with torch.autocast("cpu", torch.bfloat16):
            autocast.clip_grad_norm_(0.3)
            autocast.step()
        plain.clip_grad_norm_(0.3)
        plain.step()
    assert_equal(inside, outside)


# --- Numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2.0**63])
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(16, 512), (4, 8, 256), (1, 1)], ids=str)
def test_muon_gradient_that_is_not_finite_leaves_its_matrix(shape, ns_dtype, bad):
    """Its weights as they were, the momentum of its other blocks stepped, and so all others."""
    params = [param(*shape, seed=n) for n in range(3)] + [param(5000)]
    good = [param(*shape, seed=n) for n in range(3)] + [param(5000)]
    ours, theirs = muon(*params, ns_dtype=ns_dtype), muon(*good, ns_dtype=ns_dtype)
    for step in range(2):
        for optimizer, those in ((ours, params), (theirs, good)):
            set_grads(those, step)
            if step == 0:
                optimizer.step()
    before = params[1].detach().clone()
    m_before = ours.moments(params[1])[0].read(0, before.numel())
    params[1].grad.view(-1)[0] = bad
    with pytest.raises(FloatingPointError, match=r"in 1 parameter\(s\): '?1'? "):
        ours.step()
    theirs.step()
    m = ours.moments(params[1])[0].read(0, before.numel())
    expected = theirs.moments(good[1])[0].read(0, before.numel())
    block = min(256, before.numel())
    assert torch.equal(m[:block], m_before[:block])
    assert torch.equal(m[block:], expected[block:])
    per_matrix = before.numel() // (shape[0] if len(shape) == 3 else 1)
    assert torch.equal(params[1].view(-1)[:per_matrix], before.view(-1)[:per_matrix])
    assert torch.equal(params[1].view(-1)[per_matrix:], good[1].view(-1)[per_matrix:])
    for number in (0, 2, 3):
        assert torch.equal(params[number], good[number])
    assert ours.nonfinite_blocks > 0
    run(ours, params, 1, start=2)
    assert (params[1] != before).any()


# --- Which parameters it takes -------------------------------------------------------------------


def groups_of(optimizer) -> dict[bool, list[str]]:
    """Return the names in the groups of Muon and of AdamW."""
    return {group["use_muon"]: group["param_names"] for group in optimizer.param_groups}


def model() -> nn.Module:
    made = nn.Module()
    made.embed_tokens = nn.Embedding(20, 64)
    made.stable = StableEmbedding(20, 64)
    made.inner = nn.Linear(64, 64)
    made.conv = nn.Conv2d(4, 8, 3)
    made.lm_head = nn.Linear(64, 20)
    return made


def marked() -> nn.Module:
    """Return a model of which the attribute `use_muon` decides."""
    made = model()
    for name, p in made.named_parameters():
        p.use_muon = name == "lm_head.weight"
    return made


TAKEN = {
    "names": (model, {}, {"inner.weight", "conv.weight"}),
    "patterns": (
        model,
        {"adam_params": ["inner*", "co*"]},
        {"embed_tokens.weight", "lm_head.weight"},
    ),
    "no patterns": (
        model,
        {"adam_params": []},
        {"inner.weight", "lm_head.weight", "embed_tokens.weight", "conv.weight"},
    ),
    "attributes": (marked, {}, {"lm_head.weight"}),
}


@pytest.mark.parametrize(("make", "keywords", "expected"), TAKEN.values(), ids=TAKEN)
def test_muon_takes_matrices_by_name_pattern_and_attribute(make, keywords, expected):
    made = make()
    groups = groups_of(Muon8bitBlockwise(made.named_parameters(), **keywords))
    assert set(groups[True]) == expected
    assert set(groups[False]) == {name for name, _ in made.named_parameters()} - expected


def with_attribute(name: str, value: bool) -> list[nn.Parameter]:
    p = param(64)
    setattr(p, name, value)
    return [p]


REFUSED = {
    "without names": ([param(64, 64)], r"pass model\.named_parameters\(\)"),
    "flattened": (with_attribute("_fsdp_flattened", True), "FSDP1 has flattened"),
    "vectors": ([{"params": [param(64)], "use_muon": True}], "use_muon: .*expected 2 dimensions"),
    "a vector": (with_attribute("use_muon", True), "use_muon: .*expected 2 dimensions"),
}


@pytest.mark.parametrize(("params", "message"), REFUSED.values(), ids=REFUSED)
def test_muon_of_parameters_that_it_cannot_take_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        Muon8bitBlockwise(params)


def test_muon_keeps_groups_that_say_who_takes_them():
    embed, matrix, bias = param(20, 64), param(30, 64, seed=1), param(64)
    groups = [
        {"params": [embed], "use_muon": True, "lr": 0.5},
        {"params": [matrix, bias], "use_muon": False},
    ]
    optimizer = Muon8bitBlockwise(groups)
    found = [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [(True, 0.5, 1), (False, 1e-3, 2)]
    run(optimizer, [embed, matrix, bias], 1)
    assert "exp_avg_sq" in "".join(optimizer.state[matrix])
    assert "momentum_buffer" in "".join(optimizer.state[embed])


def test_muon_splits_each_group_and_keeps_its_settings():
    params = [("a", param(8, 64)), ("a.bias", param(64)), ("b", param(9, 64)), ("b.bias", param(7))]
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "weight_decay": 0.3}]
    optimizer = Muon8bitBlockwise(groups)
    found = [
        (g["use_muon"], g["param_names"], g["lr"], g["weight_decay"])
        for g in optimizer.param_groups
    ]
    assert found == [
        (True, ["a"], 0.5, 0.1),
        (False, ["a.bias"], 0.5, 0.1),
        (True, ["b"], 1e-3, 0.3),
        (False, ["b.bias"], 1e-3, 0.3),
    ]


def test_muon_learning_rates_of_both_are_deepspeeds_muon_lr_and_adam_lr():
    """A group's own lr comes first, as there."""
    weights = {"inner": param(8, 64), "bias": param(64)}
    own = {"params": [("late", param(8, 64)), ("last", param(64))], "lr": 0.5}
    optimizer = Muon8bitBlockwise(weights.items(), lr=0.1, muon_lr=0.2, adam_lr=torch.tensor(0.3))
    copied = pickle.loads(pickle.dumps(optimizer))
    optimizer.add_param_group(own)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
        [0.2, 0.3, 0.5, 0.5]
    )
    copied.add_param_group({"params": [("next", param(8, 64))]})
    assert copied.param_groups[-1]["lr"] == 0.2
    (matrices, others) = Muon8bitBlockwise(weights.items(), lr=0.1, adam_lr=0.3).param_groups
    assert (matrices["lr"], others["lr"]) == (0.1, 0.3)


def test_muon_newton_schulz_method_of_deepspeed_has_no_effect_and_is_logged(caplog):
    Muon8bitBlockwise([("inner", param(64, 64))], ns_method="gram")
    assert "ns_method='gram' has no effect on Muon8bitBlockwise" in caplog.messages
    with pytest.raises(ValueError, match="unknown parameter 'ns_method' for Adam8bitBlockwise"):
        Adam8bitBlockwise([param(64, 64)], ns_method="gram")


def switched(optimizer):
    optimizer.param_groups[0]["use_muon"] = False


def moved(optimizer):
    old, new = optimizer.param_groups
    new["params"].append(old["params"].pop(0))
    new["param_names"].append(old["param_names"].pop(0))


@pytest.mark.parametrize("change", [switched, moved])
def test_muon_parameter_that_changes_sides_raises_until_its_state_is_dropped(change):
    p, q = param(8, 64), param(8, 64)
    optimizer = Muon8bitBlockwise([("p", p), ("inner", param(8, 64)), ("embed", q)])
    params = [p, q]
    run(optimizer, params, 1)
    before = copy.deepcopy(params)
    change(optimizer)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(ValueError, match=r"parameter p: .*del optimizer\.state\[p\]"):
            use()
    assert_equal(params, before)
    del optimizer.state[p]
    run(optimizer, params, 1, start=1)
    assert optimizer.state[p]["step"] == 1 and "exp_avg" in str(list(optimizer.state[p]))
    assert optimizer.state[q]["step"] == 2
    optimizer.state_dict()


def test_muon_state_dict_whose_use_muon_was_switched_raises_and_changes_nothing():
    params, optimizer = made()
    run(optimizer, params.values(), 1)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"del optimizer\.state\[p\]"):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)


def test_muon_of_a_lazy_module_takes_groups_that_say_who_takes_them():
    with pytest.raises(ValueError, match="weight of a lazy module.*groups with use_muon"):
        Muon8bitBlockwise(nn.LazyLinear(8).named_parameters())
    for groups in ({True: ["weight"], False: ["bias"]}, {True: ["weight", "bias"]}):
        model = nn.LazyLinear(8)
        optimizer = Muon8bitBlockwise(
            [
                {"params": [(name, getattr(model, name)) for name in names], "use_muon": use_muon}
                for use_muon, names in groups.items()
            ]
        )
        model(torch.ones(2, 64)).sum().backward()
        if len(groups) == 2:
            optimizer.step()
            continue
        with pytest.raises(ValueError, match=r"parameter bias of shape \(8,\), expected 2"):
            optimizer.step()
        assert not optimizer.state


def test_muon_refused_group_leaves_no_part():
    """AdamW's part is refused, after Muon's was added."""
    optimizer = Muon8bitBlockwise([("first", param(8, 64))])
    group = {"params": [("inner", param(8, 64)), ("bias", param(64))], "betas": (2.0, 0.9)}
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


# --- States --------------------------------------------------------------------------------------

SHAPES = {
    "embed": (20, 300),
    "inner": (16, 512),
    "experts": (3, 10, 256),
    "conv": (16, 8, 3, 3),
    "bias": (5000,),
}


def made(dtype=FP32, **keywords):
    params = {name: param(*shape, dtype=dtype) for name, shape in SHAPES.items()}
    keywords = {"lr": 0.01, **keywords}
    return params, Muon8bitBlockwise(list(params.items()), **keywords)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_muon_state_dict_resumes_with_the_same_bits(dtype):
    params, optimizer = made(dtype)
    run(optimizer, params.values(), 2)
    others, resumed = made(dtype, lr=7.0)
    with torch.no_grad():
        for p, q in zip(others.values(), params.values(), strict=True):
            p.copy_(q)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    for p, q in zip(others.values(), params.values(), strict=True):
        assert_same(resumed.state[p], optimizer.state[q])
    run(optimizer, params.values(), 2, start=2)
    run(resumed, others.values(), 2, start=2)
    assert_equal(others.values(), params.values())


def test_muon_fp32_state_dict_loads_with_the_moments():
    """The codes of decoded moments are the same, up to the dither: float32 moments keep them."""
    params, optimizer = made(state_dict_format="fp32")
    run(optimizer, params.values(), 2)
    others, resumed = made(fp32_params=["*"])
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(others.values(), params.values(), strict=True):
        assert resumed.state[p]["step"] == 2
        for ours, theirs in zip(resumed.moments(p), optimizer.moments(q), strict=True):
            assert torch.equal(ours.read(0, p.numel()), theirs.read(0, p.numel()))


def test_muon_state_dict_of_torchs_muon_loads_with_the_moments():
    """Whose groups have no use_muon, and whose eps is that of the norm."""
    p, q = param(16, 300), param(16, 300)
    twin = torch.optim.Muon([("inner", q)], lr=0.02)
    run(twin, [q], 2)
    optimizer = Muon8bitBlockwise([("inner", p)], fp32_params=["*"])
    optimizer.load_state_dict(twin.state_dict())
    assert torch.equal(optimizer.state[p]["momentum_buffer"], twin.state[q]["momentum_buffer"])
    assert optimizer.param_groups[0]["lr"] == 0.02
    run(optimizer, [p], 1, start=2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_muon_copies_go_on_with_the_same_bits(copied):
    params, optimizer = made(BF16, adam_params=["em*"])
    run(optimizer, params.values(), 2)
    other = copied(optimizer)
    assert other.adam_params == ("em*",)
    assert [g["use_muon"] for g in other.param_groups] == [True, False]
    theirs = {
        name: p
        for group in other.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    run(optimizer, params.values(), 2, start=2)
    run(other, [theirs[name] for name in params], 2, start=2)
    for name, p in params.items():
        assert torch.equal(p, theirs[name]) and p is not theirs[name]
        assert_same(optimizer.state[p], other.state[theirs[name]])
    other.add_param_group({"params": [("new", param(8, 64))]})


# --- Values that it refuses ----------------------------------------------------------------------

BAD = {
    "lr": [-1.0, math.nan, "fast"],
    "muon_lr": [-1.0, "fast"],
    "adam_lr": [-1.0, "fast"],
    "weight_decay": [-0.1, math.nan, "much"],
    "momentum": [0.0, 1.0, -0.5, math.nan, "0.9", None],
    "nesterov": ["yes", 2],
    "ns_coefficients": [(1.0, 2.0), 3.0, "abc", ("a", "b", "c"), (1.0, math.nan, 2.0), None],
    "ns_steps": [0, -1, 100, 2.5, True, "5"],
    "ns_eps": [-1e-7, math.nan, "small"],
    "ns_dtype": ["float16", torch.float32, None],
    "adjust_lr_fn": ["matched", 3, "Original"],
    "betas": [(1.0, 0.9), (0.9,), 0.9],
    "eps": [-1e-8, "small"],
    "adam_params": ["embed", [3], [None]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=str
)
def test_muon_bad_values_raise(name, value):
    """Those of both algorithms, as soon as there are parameters of each."""
    with pytest.raises(ValueError, match=name):
        Muon8bitBlockwise([("inner", param(8, 64)), ("bias", param(64))], **{name: value})


def test_muon_knows_the_algorithm_of_a_parameter_that_zero3_takes_out_of_its_group():
    """During a step DeepSpeed leaves one partition in a group, and may load another's state."""
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    groups = [{"params": params[2 * one :][:2], "use_muon": not one} for one in range(2)]
    optimizer = Muon8bitBlockwise(groups, lr=1e-3)
    expected = [optimizer.kind_of(p, {}).algorithm for p in params]
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.param_groups[1]["params"] = []
    assert [optimizer.kind_of(p, {}).algorithm for p in params] == expected == [MUON, MUON, ADAM]
