# SPDX-License-Identifier: Apache-2.0
"""The optimizer by itself: when states appear, names, the report, and what it tells."""

import pytest
import torch
from small_optimizers import param, run
from torch import nn

from zero8 import Adam8bitBlockwise, SGD8bitBlockwise
from zero8.environment import ranks
from zero8.spec.codec import CODECS
from zero8.state.tell import tell_once

pytestmark = pytest.mark.usefixtures("one_torch_thread")
codecs = pytest.mark.parametrize("codec", CODECS)


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


# --- The report, and empty parameters ------------------------------------------------------------


@codecs
def test_optimizer_memory_report_counts_the_bytes_of_state(codec):
    model = nn.ParameterList([param(64, 300), param(64, 100), param(50)])
    optimizer = Adam8bitBlockwise(model.named_parameters(), codec=codec, fp32_params=["1"])
    run(optimizer, list(model), 1)
    report = optimizer.memory_report()
    per_block = {"dynamic": 2, "log": 3, "log6": 3, "fp8": 2, "linear4": 2}[codec]
    bits = {"log6": 6, "linear4": 4}.get(codec, 8)
    num_bytes = 2 * 19200 * bits // 8 + 512 * per_block
    assert [tuple(row.values()) for row in report.to_dicts()] == [
        ("0", (64, 300), 19200, bits, "64 rows x 2 blocks", num_bytes, 0),
        ("1", (64, 100), 6400, 32, "matches fp32_params pattern '1'", 8 * 6400, 0),
        ("2", (50,), 50, 32, "1-dimensional", 400, 0),
    ]
    for row, state in zip(report.rows, optimizer.state.values(), strict=True):
        tensors = [t for key, t in state.items() if key.startswith("exp_avg")]
        assert row.state_bytes == sum(t.nbytes for t in tensors)
    assert report.state_bytes_per_param(bits) == num_bytes / 19200
    assert report.state_bytes_per_param() == (num_bytes + 8 * 6450) / 25650
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


# --- What others do with it ----------------------------------------------------------------------


def test_optimizer_tells_once_which_share_keeps_float32_moments(caplog, monkeypatch):
    def told(*shapes):
        caplog.clear()
        with caplog.at_level("INFO", logger="zero8"):
            Adam8bitBlockwise([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        said = [r for r in caplog.records if "keep float32 moments" in r.getMessage()]
        return [(r.levelname, r.getMessage().split(" % ")[0]) for r in said]

    flat = (4096, 64), (65536,)
    assert told(*flat) == [("WARNING", "zero8: 20.0")]
    assert told((1000, 100), (1000,)) == [("INFO", "zero8: 1.0")]
    assert told((16, 4096), (4096, 16), (4000, 1, 3, 3)) == []
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert told(*flat) == []


# --- What it tells DeepSpeed ---------------------------------------------------------------------


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_engine_that_asks_for_l2_is_told_once_that_it_gets_it(monkeypatch, caplog, adam_w_mode):
    monkeypatch.setattr("zero8.optimizer.blockwise.constructing_engine", lambda: (object(), {}))
    tell_once.cache_clear()
    for _ in range(2):
        Adam8bitBlockwise([nn.Parameter(torch.zeros(4))], adam_w_mode=adam_w_mode)
        SGD8bitBlockwise([nn.Parameter(torch.zeros(4))], momentum=0.9)
    told = [line for line in caplog.messages if "adam_w_mode is false" in line]
    assert len(told) == (not adam_w_mode)
