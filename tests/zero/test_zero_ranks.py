# SPDX-License-Identifier: Apache-2.0
"""The harness of the multi-process tests: it reports what failed and leaves nothing running."""

import os
import time

import psutil
import pytest
from ranks import StandingRanks, run_ranks


def hang(folder):
    """Write this rank's process number and wait for ever."""
    with open(f"{folder}/pid{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_ranks_past_their_time_limit_say_so_and_are_gone(tmp_path):
    with pytest.raises(AssertionError, match="rank 0: time limit"):
        run_ranks(hang, 1, tmp_path, timeout_s=4, folder=str(tmp_path))
    if (tmp_path / "pid0").exists():
        assert not psutil.pid_exists(int((tmp_path / "pid0").read_text()))


def own_process(wrong_rank=None):
    """Return this process's number; if one rank is wrong, it fails and the others wait for it."""
    if os.environ["RANK"] == wrong_rank:
        raise RuntimeError("the reason")
    if wrong_rank is not None:
        time.sleep(600)
    return os.getpid()


@pytest.mark.slow
def test_standing_ranks_stay_until_one_fails_or_they_are_closed(tmp_path):
    """A failure shows the rank's output and ends the others, which would wait for it for ever."""
    ranks = StandingRanks(2, tmp_path)
    try:
        pids = ranks.run(own_process)
        assert len(set(pids)) == 2
        assert ranks.run(own_process) == pids
        with pytest.raises(AssertionError, match="rank 1: exit status 1") as caught:
            ranks.run(own_process, timeout_s=120, wrong_rank="1")
        assert "RuntimeError: the reason" in str(caught.value)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        others = ranks.run(own_process)
        assert not set(others) & set(pids)
    finally:
        ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in others)
