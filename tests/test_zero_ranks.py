# SPDX-License-Identifier: Apache-2.0
"""The harness of the multi-process tests: it reports what failed and leaves nothing running."""

import os
import time

import psutil
import pytest
from ranks import StandingRanks, run_ranks

# A first run also builds DeepSpeed's ops; a build that is interrupted leaves a lock behind.
pytestmark = pytest.mark.timeout(600)


def fail_on_rank_1(folder):
    """Write this rank's process number; then rank 1 fails, and rank 0 waits for it for ever."""
    rank = os.environ["RANK"]
    with open(f"{folder}/pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    if rank == "1":
        while not os.path.exists(f"{folder}/pid0"):
            time.sleep(0.01)
        raise RuntimeError("the reason")
    time.sleep(600)


def test_run_ranks_when_one_rank_fails_shows_its_output_and_ends_the_other(tmp_path):
    with pytest.raises(AssertionError, match="rank 1: exit status 1") as caught:
        run_ranks(fail_on_rank_1, 2, tmp_path, timeout_s=120, folder=str(tmp_path))
    assert "RuntimeError: the reason" in str(caught.value)
    assert not any(psutil.pid_exists(int((tmp_path / f"pid{r}").read_text())) for r in range(2))


def test_run_ranks_past_its_time_limit_says_so_and_ends_all(tmp_path):
    with pytest.raises(AssertionError, match="rank 0: time limit"):
        run_ranks(fail_on_rank_1, 1, tmp_path, timeout_s=4, folder=str(tmp_path))
    if (tmp_path / "pid0").exists():
        assert not psutil.pid_exists(int((tmp_path / "pid0").read_text()))


def own_process(wrong_rank=None):
    """Return this process's number, unless this rank is wrong."""
    if os.environ["RANK"] == wrong_rank:
        raise RuntimeError("the reason")
    return os.getpid()


@pytest.fixture
def standing(tmp_path):
    ranks = StandingRanks(2, tmp_path)
    yield ranks
    ranks.close()


def test_standing_ranks_run_in_the_same_processes_until_closed(standing):
    pids = standing.run(own_process)
    assert len(set(pids)) == 2
    assert standing.run(own_process) == pids
    standing.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_standing_ranks_after_a_failure_have_shown_its_output_and_start_afresh(standing):
    pids = standing.run(own_process)
    with pytest.raises(AssertionError, match="rank 1: exit status 1") as caught:
        standing.run(own_process, wrong_rank="1")
    assert "RuntimeError: the reason" in str(caught.value)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not set(standing.run(own_process)) & set(pids)
