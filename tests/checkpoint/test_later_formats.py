# SPDX-License-Identifier: Apache-2.0
"""States of a later zero8 are refused by their numbers."""

import pickle

import pytest
import torch
from moment_samples import moment

from zero8 import Adam8bitBlockwise
from zero8.deepspeed.moment_tensor import HEADER, moment_of


def made():
    """Return a parameter and its optimizer, whose state is a step old."""
    p = torch.nn.Parameter(torch.ones(10, 100))
    optimizer = Adam8bitBlockwise([("wide", p)], lr=0.1, min_8bit_size=100)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return p, optimizer


def plain_of(version=None, algorithm=None):
    """Read a state dict."""
    _, optimizer = made()
    saved = optimizer.state_dict()
    packed = saved["state"][0]["format"].clone()
    packed[0] = version or packed[0]
    packed[1] = 77 if algorithm else packed[1]
    saved["state"][0]["format"] = packed
    made()[1].load_state_dict(saved)


def changed(description, version, algorithm):
    new = {"version": version, "algorithm": algorithm}
    return description | {key: value for key, value in new.items() if value}


def zero_moment_of(version=None, algorithm=None):
    """Read a pickled moment of ZeRO."""
    saved = pickle.loads(pickle.dumps(moment("log", "exp_avg")))
    moment_of(saved | {HEADER: changed(saved[HEADER], version, algorithm)})


@pytest.mark.parametrize("read", [plain_of, zero_moment_of])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "got format version 9, this zero8 reads 1"),
        ({"algorithm": "ours"}, "got a state of algorithm ('ours'|77), expected 'adam'"),
    ],
)
def test_state_of_a_later_format_is_refused_by_its_number(read, change, message):
    read()
    with pytest.raises(ValueError, match=message):
        read(**change)
