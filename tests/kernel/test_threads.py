# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes, from what torch, launchers and binding say."""

import copy
import os
import pickle
import threading

import pytest
import torch

import zero8
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


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize("value", ["abc", "-1", "2.0", " "])
def test_step_threads_with_a_number_of_ranks_that_is_none_raises(host, variable, value):
    host(**{variable: value})
    with pytest.raises(
        ValueError, match=f"{variable}: got '{value}', expected the number of ranks"
    ):
        threads.step_threads()


def test_step_with_a_number_of_ranks_that_is_none_changes_nothing(host):
    host(LOCAL_WORLD_SIZE="abc")
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = zero8.Adam8bitBlockwise([p])
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        optimizer.step()
    assert (p == 1).all() and not optimizer.state


def test_steps_of_one_optimizer_in_two_threads_all_count():
    """The kernel works without Python's lock, so that steps overlap where nothing prevents it."""
    p = torch.nn.Parameter(torch.ones(512, 512))
    optimizer = zero8.Adam8bitBlockwise([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    optimizer.step()
    errors = []

    def steps():
        try:
            for _ in range(100):
                optimizer.step()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=steps) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert not errors and optimizer.state[p]["step"] == 201


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_optimizer_that_is_copied_has_a_lock_of_its_own(duplicate):
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = zero8.Adam8bitBlockwise([p])
    other = duplicate(optimizer)
    with optimizer._lock:
        done = threading.Thread(target=other.step)
        done.start()
        done.join(timeout=60)
        assert not done.is_alive()
