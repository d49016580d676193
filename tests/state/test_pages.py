# SPDX-License-Identifier: Apache-2.0
"""Huge pages under states: asked for, and harmless."""

import pytest
import torch

from zero8.state import store

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUMEL = 8 * store.HUGE_PAGE_BYTES


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
