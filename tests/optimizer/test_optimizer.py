# SPDX-License-Identifier: Apache-2.0
import sys
from types import SimpleNamespace

import pytest
import torch
from small_optimizers import assert_equal, param, run, set_grads, small_model
from torch import nn

from zero8 import Adam8bitBlockwise, SGD8bitBlockwise
from zero8.deepspeed import claims
from zero8.environment import numbers
from zero8.optimizer import check
from zero8.spec.codec import CODECS
from zero8.state.tell import tell_once

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
codecs = pytest.mark.parametrize("codec", CODECS)


# --- torch's interface ---------------------------------------------------------------------------


def test_optimizer_state_appears_with_the_first_gradient():
    used, unused = param(64, 100), param(64, 100)
    optimizer = Adam8bitBlockwise([used, unused], weight_decay=0.1)
    assert not optimizer.state and optimizer.memory_report().rows == ()
    before = unused.detach().clone()
    run(optimizer, [used], 2)
    assert list(optimizer.state) == [used]
    assert torch.equal(unused, before)
    run(optimizer, [unused], 1)
    assert optimizer.state[unused]["step"] == 1 and optimizer.state[used]["step"] == 3
    used.grad = None
    before = used.detach().clone()
    run(optimizer, [unused], 1)
    assert torch.equal(used, before) and optimizer.state[used]["step"] == 3


def test_optimizer_named_parameters_dither_by_name_and_not_by_order():
    models = [small_model(BF16) for _ in range(3)]
    named = [list(model.named_parameters()) for model in models]
    for model, names in zip(models, (named[0], named[1][::-1], None), strict=True):
        run(Adam8bitBlockwise(names or model.parameters(), lr=0.1), list(model.parameters()), 3)
    assert_equal(models[0].parameters(), models[1].parameters())
    # Indices are other identities.
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


# --- Refusals ------------------------------------------------------------------------------------


def sparse() -> nn.Parameter:
    embedding = nn.Embedding(100, 64, sparse=True)
    embedding(torch.tensor([3, 5])).sum().backward()
    return embedding.weight


def with_grad(p: nn.Parameter) -> nn.Parameter:
    p.grad = torch.ones_like(p)
    return p


def with_half_grad(p: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Give a parameter of another dtype a float16 gradient, which autograd would not do."""
    values, p.data = p.data.to(dtype), p.data.half()
    p.grad = torch.linspace(-2.0, 2.0, p.numel()).half().view(p.shape)
    p.data = values
    return p


def with_wrapped_grad() -> nn.Parameter:
    """A gradient of a tensor subclass without storage of its own."""
    from torch.testing._internal.two_tensor import TwoTensor

    p = param(64, 64)
    p.grad = TwoTensor(torch.ones(64, 64), torch.ones(64, 64))
    return p


BAD = {
    "sparse": (sparse, None, "parameter 1: got a sparse gradient; set sparse=False"),
    "float16 gradient of bfloat16": (
        lambda: with_half_grad(param(64, 64), torch.bfloat16),
        None,
        "gradient of a torch.bfloat16 parameter of dtype torch.float16.*keep float32 weights",
    ),
    "wrapper": (with_wrapped_grad, None, "got a gradient of type TwoTensor without storage of its"),
    "becomes complex": (
        lambda: param(64, 64),
        lambda x: x.to(torch.complex64),
        "got a parameter of dtype torch.complex64",
    ),
    "becomes float16": (
        lambda: param(64, 64),
        torch.Tensor.half,
        "dtype torch.float16.*float32 weights: use torch.autocast",
    ),
}


@pytest.mark.parametrize(("make", "change", "message"), BAD.values(), ids=BAD)
def test_optimizer_parameter_or_gradient_that_is_not_served_raises_before_any_change(
    make, change, message
):
    good, bad = with_grad(param(64, 100)), make()
    before = good.detach().clone()
    optimizer = Adam8bitBlockwise([good, bad])
    if change is not None:
        bad.data = change(bad.data)
        bad.grad = torch.ones_like(bad)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(good, before) and not optimizer.state


@pytest.mark.parametrize("codec", [*CODECS, None], ids=lambda codec: codec or "float32")
@pytest.mark.parametrize("eps", [0.0, 2.0**-126])
def test_optimizer_without_eps_leaves_what_has_no_gradient_where_it_is(codec, eps):
    """0/0 counts as 0; torch's AdamW makes NaN of it."""
    p = param(64, 128)
    settings = {"min_8bit_size": 10**6} if codec is None else {"codec": codec}
    optimizer = Adam8bitBlockwise([p], lr=0.1, eps=eps, **settings)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    p.grad[:, 5] = 1.0
    for _ in range(3):
        optimizer.step()
    moved = p.detach() != before
    assert moved[:, 5].all() and not moved[:, :5].any() and not moved[:, 6:].any()


# --- What can never be stepped is refused when the optimizer is made ------------------------------


NEVER = {
    "float16": (torch.ones(64, 64).half(), "parameter b: got one of dtype torch.float16.*autocast"),
    "float64": (
        torch.ones(64, 64).double(),
        "parameter b: got one of dtype torch.float64.*model.float",
    ),
    "complex": (
        torch.ones(64, 64) * 1j,
        "parameter b: got one of dtype torch.complex64.*view_as_real",
    ),
    "sparse": (torch.eye(64).to_sparse(), "parameter b: got layout torch.sparse_coo"),
    "meta": (torch.ones(64, 64, device="meta"), "parameter b: got one on the meta device"),
}


@pytest.mark.parametrize(("values", "message"), NEVER.values(), ids=NEVER)
def test_optimizer_of_a_parameter_that_it_can_never_step_is_refused(values, message, monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    good, bad = param(64, 100), nn.Parameter(values)
    with pytest.raises(ValueError, match=message):
        Adam8bitBlockwise([("a", good), ("b", bad)])
    optimizer = Adam8bitBlockwise([("a", good)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("b", bad)]})
    assert len(optimizer.param_groups) == 1
    Adam8bitBlockwise([("a", good), ("b", bad.requires_grad_(False))])  # frozen: never stepped


def test_optimizer_of_float16_is_made_where_deepspeed_may_put_float32_masters_in_its_place(
    monkeypatch,
):
    monkeypatch.setattr(check, "sys", SimpleNamespace(modules={"deepspeed": None}))
    Adam8bitBlockwise([param(64, 64, dtype=torch.float16)])


# --- The report, and empty parameters ------------------------------------------------------------


@codecs
def test_optimizer_memory_report_counts_the_bytes_of_state(codec):
    model = nn.ParameterList([param(64, 300), param(64, 100), param(50)])
    optimizer = Adam8bitBlockwise(model.named_parameters(), codec=codec, fp32_params=["1"])
    run(optimizer, list(model), 1)
    report = optimizer.memory_report()
    per_block = {"dynamic": 2, "log": 3, "log6": 3, "fp8": 2, "linear4": 2}[codec]
    bits = {"log6": 6, "linear4": 4}.get(codec, 8)
    expected = [
        (
            "0",
            (64, 300),
            19200,
            bits,
            "64 rows x 2 blocks",
            2 * 19200 * bits // 8 + 512 * per_block,
        ),
        ("1", (64, 100), 6400, 32, "matches fp32_params pattern '1'", 8 * 6400),
        ("2", (50,), 50, 32, "1-dimensional", 400),
    ]
    no_correction = (0,)
    assert [tuple(row.values()) for row in report.to_dicts()] == [
        e + no_correction for e in expected
    ]
    for row, state in zip(report.rows, optimizer.state.values(), strict=True):
        tensors = [t for key, t in state.items() if key.startswith("exp_avg")]
        assert row.state_bytes == sum(t.nbytes for t in tensors)
    assert report.state_bytes_per_param(bits) == expected[0][-1] / 19200
    assert report.state_bytes_per_param() == sum(e[-1] for e in expected) / 25650
    assert f"{bits}-bit: 19,200 elements" in str(report) and "32-bit: 6,450 elements" in str(report)
    assert report.grad_bytes == {"float32": 4 * 25650}
    assert "gradients in float32: 102,600 bytes" in str(report)
    optimizer.zero_grad()
    assert optimizer.memory_report().grad_bytes == {}


@pytest.mark.parametrize("shape", [(), (0,), (0, 300), (5, 0), (3, 0, 100)], ids=str)
def test_optimizer_parameter_of_one_or_no_element_is_stepped_and_saved(shape):
    p, other = nn.Parameter(torch.zeros(shape)), param(64, 100)
    optimizer = Adam8bitBlockwise([p, other], min_8bit_size=0)
    run(optimizer, [p, other], 2)
    assert optimizer.state[p]["step"] == 2
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, [p, other], 1, start=2)


def test_step_with_a_damaged_state_changes_nothing_and_makes_no_states():
    """A parameter whose turn comes before the damaged one's must not be left with zero state."""
    params = [param(64, 80, seed=seed) for seed in range(3)]
    optimizer = Adam8bitBlockwise(params)
    set_grads(params[1:], step=0)
    optimizer.step()
    good = optimizer.state[params[1]]["format"].clone()
    optimizer.state[params[1]]["format"][0] = 99
    weights = [p.detach().clone() for p in params]
    set_grads(params, step=1)
    with pytest.raises(ValueError, match="format version 99"):
        optimizer.step()
    assert list(optimizer.state) == params[1:]
    assert [optimizer.state[p]["step"] for p in params[1:]] == [1, 1]
    assert_equal(params, weights)
    optimizer.state[params[1]]["format"].copy_(good)
    optimizer.step()
    assert [optimizer.state[p]["step"] for p in params] == [1, 2, 2]


# --- What others do with it ----------------------------------------------------------------------


def test_optimizer_states_moved_as_a_whole_elsewhere_still_say_what_they_are():
    """As by `for k, v in state.items(): state[k] = v.to(device)`: the description comes back."""
    p = param(64, 100)
    optimizer = Adam8bitBlockwise([p])
    run(optimizer, [p], 2)
    state, moves = optimizer.state[p], []

    class Elsewhere(torch.Tensor):
        def cpu(self):
            moves.append(self)
            return self.as_subclass(torch.Tensor)

    state["format"] = state["format"].clone().as_subclass(Elsewhere)
    run(optimizer, [p], 2)
    assert len(moves) == 1 and state["step"] == 4


def told(caplog, shapes, **settings):
    """Return what the constructor says of float32 moments, with its level."""
    caplog.clear()
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with caplog.at_level("INFO", logger="zero8"):
        Adam8bitBlockwise(params, **settings)
    said = [r for r in caplog.records if "keep float32 moments" in r.getMessage()]
    return [(r.levelname, r.getMessage()) for r in said]


def test_optimizer_tells_once_which_share_keeps_float32_moments(caplog, monkeypatch):
    flat = [(4096, 64), (65536,)]
    assert told(caplog, flat) == [
        (
            "WARNING",
            "zero8: 20.0 % of the elements keep float32 moments (of fewer than 2 dimensions: "
            "20.0%): memory_report() lists them",
        )
    ]
    ((level, text),) = told(caplog, [(1000, 100), (1000,)])
    assert level == "INFO" and "zero8: 1.0 % of the elements" in text
    assert told(caplog, [(1000, 100)]) == []
    assert told(caplog, [(16, 4096), (4096, 16), (4000, 1, 3, 3)]) == []
    monkeypatch.setattr(numbers, "rank", lambda: 1)
    assert told(caplog, flat) == []


# --- What it tells DeepSpeed ---------------------------------------------------------------------


def test_use_after_a_step_is_met_and_outlives_the_optimizer(monkeypatch):
    uses = []
    monkeypatch.setattr(claims, "claim", lambda params, made: uses.append(made))
    p = nn.Parameter(torch.zeros(4, 1024))
    optimizer = Adam8bitBlockwise([p])
    p.grad = torch.ones_like(p)
    assert not uses[0].is_met
    optimizer.step()
    del optimizer
    assert uses[0].is_met


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_engine_that_asks_for_l2_is_told_once_that_it_gets_it(monkeypatch, caplog, adam_w_mode):
    monkeypatch.setattr("zero8.optimizer.blockwise.constructing_engine", lambda: (object(), {}))
    tell_once.cache_clear()
    for _ in range(2):
        Adam8bitBlockwise([nn.Parameter(torch.zeros(4))], adam_w_mode=adam_w_mode)
        SGD8bitBlockwise([nn.Parameter(torch.zeros(4))], momentum=0.9)
    told = [line for line in caplog.messages if "adam_w_mode is false" in line]
    assert len(told) == (not adam_w_mode)
