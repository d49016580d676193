# SPDX-License-Identifier: Apache-2.0
"""States of a later zero8 are refused by their numbers."""

import pickle
import struct

import pytest
import torch
from moment_samples import MOMENTS, moment

from zero8 import Adam8bitBlockwise
from zero8.deepspeed import swap_file
from zero8.deepspeed.moment_tensor import HEADER, moment_of
from zero8.deepspeed.swap_file import BLOCK_BYTES, HEADER_BYTES, Layout
from zero8.files.manifest import hash_64


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


def swap_file_of(version=None, algorithm=None):
    """Read a file of a swapped state."""
    state = {"step": 7, "history": 0.25, **{name: moment("log", name) for name in MOMENTS}}
    layout = Layout.of_state(state)
    buffer = torch.zeros(layout.file_bytes(BLOCK_BYTES), dtype=torch.uint8)
    swap_file.pack(state, layout, buffer)
    if algorithm:  # of as many letters
        text = layout.description.replace(b'"adam"', f'"{algorithm}"'.encode())
        buffer.numpy()[HEADER_BYTES:][: len(text)] = list(text)
    if version:
        buffer.numpy()[16:20] = list(struct.pack("<I", version))
    buffer.numpy()[8:16] = 0
    buffer.numpy()[8:16] = list(struct.pack("<Q", hash_64((buffer.numpy(),))))
    return swap_file.unpack(buffer, "the file"), buffer


@pytest.mark.parametrize("read", [plain_of, zero_moment_of, swap_file_of])
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


def test_swap_file_of_an_unknown_algorithm_is_not_only_called_damaged():
    with pytest.raises(ValueError, match="the file: .* damaged, or of a later zero8"):
        swap_file_of(algorithm="ours")
