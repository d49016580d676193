# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes, from what torch, launchers and binding say."""

import os

import pytest
import torch

from zero8.op import threads

VARIABLES = ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@pytest.fixture
def host(monkeypatch):
    """A host of 16 processors on which torch would take 12; returns what sets it up."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_up(available=16, **env):
        own = {0, os.getpid()}
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda pid: set(range(available if pid in own else 16))
        )
        monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    return set_up


def test_step_threads_of_a_lone_process_are_torchs(host):
    host()
    assert threads.step_threads() == 12


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize(("ranks", "share"), [(0, 12), (1, 12), (2, 8), (5, 3), (16, 1), (40, 1)])
def test_step_threads_of_several_ranks_share_the_processors(host, variable, ranks, share):
    host(**{variable: str(ranks)})
    assert threads.step_threads() == share


def test_step_threads_with_omp_num_threads_are_torchs(host):
    host(OMP_NUM_THREADS="12", LOCAL_WORLD_SIZE="4")
    assert threads.step_threads() == 12


def test_step_threads_of_a_bound_rank_are_torchs(host):
    host(available=12, LOCAL_WORLD_SIZE="4")
    assert threads.step_threads() == 12
