# SPDX-License-Identifier: Apache-2.0
"""How many threads a step takes, from what torch, launchers and binding say."""

import os
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


THREADS = {
    "a lone process": (16, {}, 12),
    "no rank": (16, {"LOCAL_WORLD_SIZE": "0"}, 12),
    "two ranks": (16, {"LOCAL_WORLD_SIZE": "2"}, 8),
    "five ranks of DeepSpeed's launcher": (16, {"LOCAL_SIZE": "5"}, 3),
    "more ranks than processors": (16, {"LOCAL_WORLD_SIZE": "40"}, 1),
    "OMP_NUM_THREADS": (16, {"OMP_NUM_THREADS": "12", "LOCAL_WORLD_SIZE": "4"}, 12),
    "a bound rank": (12, {"LOCAL_WORLD_SIZE": "4"}, 12),
}


@pytest.mark.parametrize(("available", "env", "expected"), THREADS.values(), ids=THREADS)
def test_step_threads_are_torchs_or_a_ranks_share(host, available, env, expected):
    host(available, **env)
    assert threads.step_threads() == expected


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
@pytest.mark.parametrize("value", ["abc", "-1", "2.0", " "])
def test_step_threads_with_a_number_of_ranks_that_is_none_raises(host, variable, value):
    host(**{variable: value})
    with pytest.raises(
        ValueError, match=f"{variable}: got '{value}', expected the number of ranks"
    ):
        threads.step_threads()


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


STEP_IN_A_FORK = """
import os, sys, torch, zero8

torch.set_num_threads(2)
p = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 1024).view(64, 1024))
p.grad = torch.cos(p.detach())
optimizer = zero8.Adam8bitBlockwise([p], lr=1e-3)
optimizer.step()
child = os.fork()
optimizer.step()
optimizer.step()
torch.save(optimizer.state_dict(), sys.argv[2 if child else 1])
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_step_in_a_fork_of_a_process_that_has_stepped_takes_one_thread_and_the_same_bits(
    forks, tmp_path
):
    """Its parent's threads are gone; a kernel of two would wait for the second without end."""
    paths = [str(tmp_path / name) for name in ("child", "parent")]
    done = forks.run(STEP_IN_A_FORK, *paths, seconds=60, **dict.fromkeys(VARIABLES))
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.count("was forked from one that had taken steps, and steps in one thread") == 1
    )
    child, parent = (torch.load(path)["state"][0] for path in paths)
    assert child.keys() == parent.keys()
    assert all(torch.equal(torch.as_tensor(child[k]), torch.as_tensor(parent[k])) for k in child)
