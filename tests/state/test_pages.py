# SPDX-License-Identifier: Apache-2.0
"""Huge pages under states: asked for, and harmless."""

import re
from pathlib import Path

import pytest
import torch

import zero8
from zero8.state import store

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUMEL = 8 * store.HUGE_PAGE_BYTES


def is_advised(x: torch.Tensor) -> bool:
    """Whether the middle of a tensor lies in a mapping that asks for huge pages."""
    middle = x.data_ptr() + x.nbytes // 2
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= middle < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping")


def test_states_of_a_large_parameter_lie_where_huge_pages_are_asked_for():
    p = torch.nn.Parameter(torch.zeros(2048, 8192))
    p.grad = torch.ones_like(p)
    optimizer = zero8.Adam8bitBlockwise([p])
    optimizer.step()
    assert is_advised(optimizer.state[p]["exp_avg_q8"])
    assert is_advised(optimizer.state[p]["exp_avg_sq_q8"])


PLACES = [(0, NUMEL), (1, NUMEL - 1), (4097, 5_000_000), (0, store.HUGE_PAGE_BYTES - 1), (0, 0)]


@pytest.mark.parametrize(("start", "numel"), PLACES)
def test_advise_huge_never_reaches_beyond_the_tensor(start, numel, monkeypatch):
    calls = []
    monkeypatch.setattr(store, "_madvise", lambda: lambda *call: calls.append(call))
    x = torch.empty(NUMEL, dtype=torch.uint8)[start : start + numel]
    assert store.advise_huge(x) is x
    assert len(calls) == (numel >= 2 * store.HUGE_PAGE_BYTES)
    for begin, length, _ in calls:
        assert begin % store.HUGE_PAGE_BYTES == length % store.HUGE_PAGE_BYTES == 0
        assert x.data_ptr() <= begin and begin + length <= x.data_ptr() + numel
        assert length > numel - 2 * store.HUGE_PAGE_BYTES
