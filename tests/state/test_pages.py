# SPDX-License-Identifier: Apache-2.0
"""Huge pages under states: asked for, and harmless."""

import mmap
import re
from pathlib import Path

import pytest
import torch

import zero8
from zero8.state import huge_pages as pages

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUMEL = 8 * pages.HUGE_PAGE_BYTES


def advised(x: torch.Tensor) -> bool:
    """Whether the middle of a tensor lies in a mapping that asks for huge pages."""
    middle = x.data_ptr() + x.nbytes // 2
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= middle < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping")


def fresh() -> torch.Tensor:
    """Return a tensor in a mapping of its own.

    torch may reuse memory of a tensor that was freed, for which huge pages were asked already.
    """
    private = mmap.mmap(-1, NUMEL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(private, dtype=torch.uint8)


def test_advise_huge_marks_the_mapping_of_a_large_tensor():
    plain, marked = fresh(), fresh()
    assert pages.advise_huge(marked) is marked
    assert advised(marked) and not advised(plain)


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0, dtype=torch.uint8),
        torch.empty(pages.HUGE_PAGE_BYTES - 1, dtype=torch.uint8),
        torch.empty(NUMEL, dtype=torch.uint8, device="meta"),
    ],
    ids=lambda x: f"{x.numel()}_{x.device}",
)
def test_advise_huge_of_a_tensor_without_a_whole_huge_page_does_nothing(x, monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    assert pages.advise_huge(x) is x


@pytest.mark.parametrize("start, numel", [(0, NUMEL), (1, NUMEL - 1), (4097, 5_000_000)])
def test_advise_huge_never_reaches_beyond_the_tensor(start, numel, monkeypatch):
    calls = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: calls.append(call))
    x = torch.empty(NUMEL, dtype=torch.uint8)[start : start + numel]
    pages.advise_huge(x)
    ((begin, length, _),) = calls
    assert begin % pages.HUGE_PAGE_BYTES == length % pages.HUGE_PAGE_BYTES == 0
    assert x.data_ptr() <= begin and begin + length <= x.data_ptr() + numel
    assert length > numel - 2 * pages.HUGE_PAGE_BYTES


def test_states_of_a_large_parameter_lie_where_huge_pages_are_asked_for():
    p = torch.nn.Parameter(torch.zeros(2048, 8192))
    p.grad = torch.ones_like(p)
    optimizer = zero8.Adam8bitBlockwise([p])
    optimizer.step()
    assert advised(optimizer.state[p]["exp_avg_q8"])
    assert advised(optimizer.state[p]["exp_avg_sq_q8"])
