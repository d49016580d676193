# SPDX-License-Identifier: Apache-2.0
"""Muon on plain tensors: its steps and states, and which parameters it takes."""

import copy
import math
import pickle

import newton_schulz
import numpy as np
import pytest
import torch
from nests import assert_same
from ranks import error_of
from reference_twin import NAME, SEED, SHAPE, ReferenceTwin
from small_optimizers import assert_equal, param, run, set_grads
from torch import nn

from examples.gpt.engines import join_ranks
from zero8 import Adam8bitBlockwise, Muon8bitBlockwise, StableEmbedding
from zero8.optimizer.clipping import factor_of
from zero8.optimizer.owners import Held, rounds_of
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


def codes_of(optimizer, p) -> dict[str, torch.Tensor]:
    """Return the entries of a moment."""
    return {k: v for k, v in optimizer.state[p].items() if k.startswith("momentum_buffer")}


# --- The step -----------------------------------------------------------------------------------


@nesterovs
@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (3, 4, 12)], ids=["wide", "tall", "experts"])
def test_muon_float32_moments_follow_float64(shape, nesterov):
    """Keller Jordan's Muon in float64, written here, is the exact value, matrix by matrix."""
    lr, momentum, weight_decay = 0.02, 0.9, 0.1
    p = param(*shape)
    keywords = {"momentum": momentum, "weight_decay": weight_decay, "fp32_params": ["*"]}
    optimizer = muon(p, lr=lr, nesterov=nesterov, **keywords)
    exact, m = p.detach().double().numpy().copy(), np.zeros(shape)
    size = lr * math.sqrt(max(1, shape[-2] / shape[-1]))
    for t in range(1, 5):
        set_grads([p], t)
        g = p.grad.double().numpy()
        optimizer.step()
        m = m + (1 - momentum) * (g - m)
        u = g + momentum * (m - g) if nesterov else m
        for at in np.ndindex(shape[:-2]):
            exact[at] = (1 - lr * weight_decay) * exact[at] - size * newton_schulz.exact(u[at])
        assert np.abs(p.detach().double().numpy() - exact).max() < lr / 1000, f"step {t}"
    found = optimizer.state[p]["momentum_buffer"].double().numpy()
    assert np.abs(found - m).max() < 1e-6


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


@pytest.mark.parametrize("fast", [{}, {"avx512_bf16": True}, {"amx_bf16": True}], ids=str)
def test_muon_orthogonalizes_in_bfloat16_where_the_processor_computes_in_it(fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: fast)
    ours, theirs = param(64, 64), param(64, 64)
    for p, setting in ((ours, "auto"), (theirs, "bfloat16" if fast else "float32")):
        optimizer = muon(p, ns_dtype=setting)
        set_grads([p], 1)
        optimizer.step()
    assert torch.equal(ours, theirs)


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


# --- Numbers that are not finite ----------------------------------------------------------------


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


# --- Which parameters it takes --------------------------------------------------------------------


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


# The modules whose weights it takes.
TAKEN = {
    "names": (model, {}, "inner conv"),
    "patterns": (model, {"adam_params": ["inner*", "co*"]}, "embed_tokens lm_head"),
    "no patterns": (model, {"adam_params": []}, "inner lm_head embed_tokens conv"),
    "attributes": (marked, {}, "lm_head"),
}


@pytest.mark.parametrize(("make", "keywords", "modules"), TAKEN.values(), ids=TAKEN)
def test_muon_takes_matrices_by_name_pattern_and_attribute(make, keywords, modules):
    made, expected = make(), {f"{name}.weight" for name in modules.split()}
    groups = Muon8bitBlockwise(made.named_parameters(), **keywords).param_groups
    found = {group["use_muon"]: set(group["param_names"]) for group in groups}
    assert found[True] == expected
    assert found[False] == {name for name, _ in made.named_parameters()} - expected


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
    before, saved = copy.deepcopy((params, optimizer.state_dict()))
    loaded = copy.deepcopy(saved)
    loaded["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"del optimizer\.state\[p\]"):
        optimizer.load_state_dict(loaded)
    assert_same(optimizer.state_dict(), saved)
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


def test_muon_refused_group_leaves_no_part():
    """AdamW's part is refused, after Muon's was added."""
    optimizer = Muon8bitBlockwise([("first", param(8, 64))])
    group = {"params": [("inner", param(8, 64)), ("bias", param(64))], "betas": (2.0, 0.9)}
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


# --- Matrices that ranks hold parts of ------------------------------------------------------------

# What the last rank holds in the place of its range.
WRONG = {
    "missing at the end": lambda first, numel: ((first, numel - 1),),
    "missing inside": lambda first, numel: ((first, 2), (first + 3, numel - 3)),
    "twice": lambda first, numel: ((first, numel), (first + 1, 1)),
    "beyond": lambda first, numel: ((first, numel + 1),),
}


def refused():
    """Return what is raised where elements are held twice, or by no rank; and rounds of nothing."""
    join_ranks()
    world = torch.distributed.group.WORLD
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    numel, found = 60 // size, []
    for wrong in WRONG.values():
        first = rank * numel
        ranges = wrong(first, numel) if rank == size - 1 else ((first, numel),)
        found.append(error_of(rounds_of, {11: Held((6, 10), 0, {0: ranges})}, world, 48))
    return found, rounds_of({}, world, 48)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_owners_of_matrices_that_are_not_whole_raise_on_all_ranks(num_ranks, standing_ranks):
    for errors, rounds_of_nothing in standing_ranks(num_ranks).run(refused):
        assert rounds_of_nothing == []
        for name, text in errors:
            assert name == "ValueError" and "of a matrix of 60" in text
