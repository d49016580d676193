# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and copying the state of plain parameters.

The golden file was made by `git show 5c62b323:tests/optimizer/test_optimizer_state.py`.
It is never made again: it stands for the checkpoints that users have.  A new format version gets a
file of its own.
"""

import copy

import pytest
import torch
from nests import assert_same
from places import GOLDEN
from small_optimizers import LR, OPTIONS, named_params, param, run
from torch import nn

import zero8
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.spec.algorithm import UNKNOWN
from zero8.spec.codec import CODECS
from zero8.state.tell import tell_of_reencoding, tell_once

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SAVED = GOLDEN / "plain_state.pt"
SHAPES = {"wide": (2, 333), "experts": (2, 2, 100), "vector": (17,)}
SMALL = {"lr": 0.1, "min_8bit_size": 100}
FP32, BF16 = torch.float32, torch.bfloat16
codecs = pytest.mark.parametrize("codec", CODECS)
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)


def optimizer_of(params, made=Adam8bitBlockwise, **keywords):
    return made(list(params.items()), **{**SMALL, **keywords})


def trained(dtype=FP32, steps: int = 3, **keywords):
    """Return parameters by name and their optimizer after a few steps."""
    params = named_params(SHAPES, dtype)
    optimizer = optimizer_of(params, **keywords)
    run(optimizer, params.values(), steps)
    return params, optimizer


def moments(optimizer, p) -> list[torch.Tensor]:
    return [store.read(0, p.numel()).view(p.shape) for store in optimizer.moments(p)]


# --- Round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [Adam8bitBlockwise, torch.optim.AdamW])
@dtypes
def test_loaded_state_shares_no_memory_with_the_dict_and_no_graph(theirs, dtype):
    params, optimizer = trained(dtype)
    others = named_params(SHAPES, dtype)
    other = theirs(others.values())
    run(other, others.values(), 1)
    saved = copy.deepcopy(other.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.clone().requires_grad_() * 1
    values = [v.detach().clone() for v in tensors_in(saved["state"])]
    optimizer.load_state_dict(saved)
    assert not any(tensor.requires_grad for tensor in tensors_in(optimizer.state))
    run(copy.deepcopy(optimizer), params.values(), 1)
    run(optimizer, params.values(), 1, start=3)
    assert_same([v.detach() for v in tensors_in(saved["state"])], values)


def tensors_in(states) -> list[torch.Tensor]:
    found = [value for state in states.values() for value in state.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


def test_deepcopy_with_a_gradient_of_another_dtype_goes_on_with_the_same_bits():
    """torch's deepcopy of such a parameter fails."""
    p = param(64, 64)
    p.grad_dtype = BF16
    p.grad = torch.linspace(1, 2, 4096).view(64, 64).to(BF16)
    optimizer = Adam8bitBlockwise([p], lr=0.1)
    optimizer.step()
    new = copy.deepcopy({"again": optimizer, "optimizer": optimizer})
    assert new["again"] is new["optimizer"]
    (q,) = new["again"].param_groups[0]["params"]
    assert q is not p and q.grad is not p.grad
    assert_same(q.grad, p.grad)
    for one in (optimizer, new["again"]):
        one.step()
    assert torch.equal(p, q)


@dtypes
def test_load_state_dict_of_fp32_adamw_quantizes_its_moments(dtype):
    """Moments within the codes' bounds, exact where they stay float32; the step count goes on."""
    params, theirs = named_params(SHAPES, dtype), named_params(SHAPES, dtype)
    adamw = torch.optim.AdamW(theirs.values(), lr=0.3, foreach=False)
    run(adamw, theirs.values(), 3)
    optimizer = optimizer_of(params, codec="log")
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    for name, p in params.items():
        exact = adamw.state[theirs[name]]
        assert optimizer.state[p]["step"] == 3 and type(optimizer.state[p]["step"]) is int
        assert optimizer.state[p]["history"] == UNKNOWN  # m^2/v may be anything
        # Half a code.  Of v that is 14/254 at most; of m 1/64 of |x| + s with a scale s of at most
        # 1/14.75 of the largest, or 1/32 with 1/247; and less than 2^-20 for roundings.
        m, v = (exact[which].float() for which in ("exp_avg", "exp_avg_sq"))
        size, top = m.abs(), m.abs().amax()
        bounds = ((size + top / 14.75) / 64).maximum((size + top / 247) / 32), v * 14 / 254
        for got, value, bound in zip(moments(optimizer, p), (m, v), bounds, strict=True):
            bound = bound * (1 + 2.0**-14) if p.ndim > 1 else 0.0
            assert ((got - value).abs() <= bound).all()
    run(optimizer, params.values(), 2, start=3)


LOG = "codec='log', block_size=256"
# Settings of the loading optimizer; the forms that are logged.
OTHER_FORMS = {
    "block size": ({"block_size": 64}, (LOG, "codec='log', block_size=64")),
    "codec": ({"codec": "dynamic"}, (LOG, "codec='dynamic', block_size=256")),
    "to float32": ({"min_8bit_size": 10**6}, (LOG, "float32 moments")),
    "to 8-bit": ({"min_8bit_size": 1}, ("float32 moments", LOG)),
    "the same": ({}, None),
}


@pytest.mark.parametrize(("keywords", "forms"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_load_state_dict_into_another_form_quantizes_the_moments_and_logs_it_once(
    keywords, forms, caplog
):
    """What a state decodes to, written into fresh states of the other form."""
    tell_once.cache_clear()
    params, optimizer = trained(codec="log", min_8bit_size=500)
    others, theirs = named_params(SHAPES), named_params(SHAPES)
    keywords = {"min_8bit_size": 500, **keywords}
    other, expected = (optimizer_of(each, **keywords) for each in (others, theirs))
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    expected.load_state_dict(zero8.export(optimizer))
    for p, q, old in zip(others.values(), theirs.values(), params.values(), strict=True):
        assert (other.state[p]["step"], expected.state[q]["step"]) == (3, 3)
        assert other.state[p]["history"] == optimizer.state[old]["history"]
        assert_same(moments(other, p), moments(expected, q))
    run(other, others.values(), 1, start=3)
    said = [line for line in caplog.messages if "were saved with" in line]
    if forms is None:
        assert said == []
        return
    (line,) = said
    assert "saved with {} and loaded with {}, the".format(*forms) in line


def test_form_that_is_kept_is_not_logged(caplog):
    """A flat state has several parameters, of which some may keep theirs."""
    tell_of_reencoding((CODECS["log"], 256), (CODECS["log"], 256))
    assert caplog.messages == []


# --- The golden file ----------------------------------------------------------------------------


@dtypes
@codecs
def test_golden_state_loads_verbatim_and_decodes_to_the_moments_beside_it(codec, dtype):
    saved = torch.load(SAVED, weights_only=True)[f"{codec} {dtype}"]
    params = named_params(SHAPES, dtype)
    optimizer = optimizer_of(params, codec=codec)
    optimizer.load_state_dict(copy.deepcopy(saved["state_dict"]))
    for number, p in enumerate(params.values()):
        assert_same(optimizer.state[p], saved["state_dict"]["state"][number])
        assert_same(moments(optimizer, p), list(saved["moments"][number].values()))
    run(optimizer, params.values(), 1, start=5)


# --- Each algorithm's -----------------------------------------------------------------------------

ADAM, LION, SGD, MIX = Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise, AdEMAMix8bitBlockwise
every = pytest.mark.parametrize("made", OPTIONS, ids=lambda one: one.algorithm.name)
one_moment = pytest.mark.parametrize("made", [LION, SGD], ids=lambda one: one.algorithm.name)


@every
def test_algorithm_state_has_its_bytes(made):
    p = param(64, 512)
    algorithm, optimizer = made.algorithm, made([("w", p)], **OPTIONS[made])
    run(optimizer, [p], 2)
    state = optimizer.state[p]
    moments = [f"{name}{kind}" for name in algorithm.moment_names for kind in ("_q8", "_scale")]
    assert sorted(state) == sorted(["format", "step", *algorithm.memory, *moments])
    assert state["format"].tolist()[:2] == [1, algorithm.number]
    (row,) = optimizer.memory_report().rows
    scales = {ADAM: 3, MIX: 4}.get(made, 1)  # v has two
    assert row.state_bytes == len(algorithm.moments) * 64 * 512 + 4 * scales * 64 * 2


@one_moment
def test_one_moment_of_another_library_loads_without_a_step(made):
    """The states of the usual Lion and of torch's SGD are their moments alone."""
    p = param(20, 300)
    moment, (name,) = param(20, 300, seed=1).detach(), made.algorithm.moment_names
    group = {"params": [0], **OPTIONS[made], "lr": 3e-4}
    optimizer = made([p], **OPTIONS[made])
    optimizer.load_state_dict({"state": {0: {name: moment}}, "param_groups": [group]})
    assert optimizer.state[p]["step"] == (1 if made is SGD else 0)
    assert optimizer.param_groups[0]["lr"] == 3e-4
    assert (moments(optimizer, p)[0] - moment).abs().max() < 0.04 * moment.abs().max()
    run(optimizer, [p], 1)


def test_sgd_state_dict_of_torch_go_in_and_out():
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


def state_dict_of(optimizer_class, **keywords):
    p = param(20, 300)
    optimizer = optimizer_class([p], **OPTIONS.get(optimizer_class, {}) | keywords)
    run(optimizer, [p], 1)
    return optimizer.state_dict()


FOREIGN = {
    "Lion from Adam": (LION, ADAM, "one of Adam8bitBlockwise"),
    "Lion from AdamW": (LION, torch.optim.AdamW, "one of an fp32 Adam"),
    "AdEMAMix from Adam": (MIX, ADAM, "betas: got .* three numbers"),
    "Adam from AdEMAMix": (ADAM, MIX, "betas: got .* two numbers"),
    "Lion from AdEMAMix": (LION, MIX, "betas: got .* two numbers"),
    "SGD from AdamW": (SGD, torch.optim.AdamW, r"without \['momentum_buffer'\]"),
    "Adam from an fp32 Lion": (ADAM, LION, r"without \['exp_avg_sq'\]"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_state_dict_of_other_algorithms_are_refused(name):
    ours, theirs, message = FOREIGN[name]
    saved = state_dict_of(theirs, **{"state_dict_format": "fp32"} if "fp32" in name else {})
    p = param(20, 300)
    optimizer = ours([p], **OPTIONS.get(ours, {}))
    run(optimizer, [p], 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], before["state"])
