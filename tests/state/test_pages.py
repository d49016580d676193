# SPDX-License-Identifier: Apache-2.0
"""Huge pages under states, parameters and gradients: asked for, and harmless."""

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


@pytest.mark.parametrize("numel", [0, 1, pages.HUGE_PAGE_BYTES - 1])
def test_pages_of_a_tensor_without_a_whole_huge_page_are_left_alone(numel, monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    x = torch.empty(numel, dtype=torch.uint8)
    assert pages.advise_huge(x) is x
    assert not pages.collapse(x)


def test_pages_of_a_tensor_without_host_memory_are_left_alone(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: pytest.fail)
    assert not pages.collapse(torch.empty(NUMEL, dtype=torch.uint8, device="meta"))


def test_advise_never_reaches_beyond_the_tensor(monkeypatch):
    calls = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: calls.append(call) or 0)
    whole = torch.empty(NUMEL, dtype=torch.uint8)
    for start, numel in [(0, NUMEL), (1, NUMEL - 1), (4097, 5_000_000)]:
        x = whole[start : start + numel]
        assert pages.collapse(x)
        begin, length, _ = calls.pop()
        assert begin % pages.HUGE_PAGE_BYTES == length % pages.HUGE_PAGE_BYTES == 0
        assert x.data_ptr() <= begin and begin + length <= x.data_ptr() + numel
        assert length > numel - 2 * pages.HUGE_PAGE_BYTES


def test_collapse_keeps_contents_and_address():
    x = torch.arange(NUMEL // 8)
    before, address = x.clone(), x.data_ptr()
    pages.collapse(x)  # an older Linux refuses
    assert x.data_ptr() == address and torch.equal(x, before)


def test_states_of_a_large_parameter_lie_where_huge_pages_are_asked_for():
    p = torch.nn.Parameter(torch.zeros(2048, 8192))
    p.grad = torch.ones_like(p)
    optimizer = zero8.Adam8bitBlockwise([p])
    optimizer.step()
    assert advised(optimizer.state[p]["exp_avg_q8"])
    assert advised(optimizer.state[p]["exp_avg_sq_q8"])


def test_step_with_huge_pages_equals_the_step_without():
    results = []
    for huge_pages in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 2**22).view(1024, 4096))
        optimizer = zero8.Adam8bitBlockwise([p], huge_pages=huge_pages)
        for number in range(2):
            p.grad = torch.linspace(-1, 2 + number, 2**22).view_as(p)
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)
