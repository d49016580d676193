# SPDX-License-Identifier: Apache-2.0
"""Locks of builds: whom they are waited for, and which are found."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zero8.op import locks

HOST = os.uname().nodename


@pytest.fixture
def held(tmp_path):
    """A lock in a folder of builds that somebody else holds, and the file to close to release it.

    Two open files of one process exclude each other as those of two processes do.
    """
    with open(tmp_path / "op.flock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@pytest.mark.parametrize(
    ("written", "said"),
    [("process 7 on node3", "process 7 on node3"), ("", "an unknown process")],
)
def test_lock_that_is_held_is_waited_for_and_its_holder_named_with_the_remedy(
    held, caplog, monkeypatch, written, said
):
    monkeypatch.setattr(locks, "PATIENCE_S", 0.2)
    held.write(written)
    held.flush()

    def release():
        while not caplog.messages:
            time.sleep(0.01)
        held.close()

    thread = threading.Thread(target=release)
    thread.start()
    path = Path(held.name)
    with locks.locked(path):
        thread.join()
        assert path.read_text().startswith(f"process {os.getpid()} on {HOST}, since 2")
    (message,) = caplog.messages
    assert f"has waited 0 s for {said}" in message
    assert f"has locked {path}" in message
    assert "remove that file and start again" in message


def test_lock_that_is_released_in_time_is_taken_without_a_word(held, caplog):
    threading.Timer(0.2, held.close).start()
    with locks.locked(Path(held.name)):
        pass
    assert caplog.messages == []


def test_lock_that_the_file_system_refuses_is_an_error_that_names_it_and_the_way_out(
    tmp_path, monkeypatch
):
    """Two builds at once would destroy each other's files."""

    def fail(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("fcntl.flock", fail)
    refused = f"TORCH_EXTENSIONS_DIR .*cannot be locked.*{tmp_path}/op.flock"
    with pytest.raises(RuntimeError, match=refused), locks.locked(tmp_path / "op.flock"):
        pass


def test_find_lists_what_is_held_with_its_holder_and_nothing_else(held, tmp_path):
    held.write("process 7 on node3")
    held.flush()
    (tmp_path / "free.flock").touch()
    (found,) = locks.find(tmp_path)
    assert (found.path, found.holder) == (str(tmp_path / "op.flock"), "process 7 on node3")
    assert not found.removable
    assert "held by process 7 on node3" in str(found)


def left_lock(folder, age_s=0.0):
    """Make torch's lock of a build in a folder whose files are so old."""
    folder.mkdir(parents=True)
    (folder / "build.ninja").touch()
    (folder / "lock").touch()
    then = time.time() - age_s
    for path in (folder / "lock", folder / "build.ninja", folder):
        os.utime(path, (then, then))
    return folder


@pytest.mark.parametrize("place", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_find_calls_a_lock_of_torch_removable_when_nothing_has_changed_for_an_hour(tmp_path, place):
    left_lock(tmp_path / place, age_s=locks.QUIET_S + 60)
    (found,) = locks.find(tmp_path)
    assert found.path == str(tmp_path / place / "lock")
    assert (found.holder, found.removable) == (None, True)
    assert found.age_s == pytest.approx(locks.QUIET_S + 60, abs=30)
    assert f"remove it: rm '{found.path}'" in str(found)


def test_find_does_not_call_removable_what_another_host_may_hold(tmp_path):
    """Its compiler may have written a file since, or have had no time to."""
    left_lock(tmp_path / "young")
    os.utime(left_lock(tmp_path / "written", age_s=2 * locks.QUIET_S) / "build.ninja")
    found = locks.find(tmp_path)
    assert len(found) == 2
    for lock in found:
        assert (lock.holder, lock.removable) == (None, False)
        assert "If none of another host does, remove it" in str(lock)


def test_find_names_the_process_of_this_host_that_builds_there(tmp_path):
    """However long it has been quiet."""
    folder = left_lock(tmp_path / "op", age_s=2 * locks.QUIET_S)
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdin=subprocess.PIPE
    ) as builder:
        (found,) = locks.find(tmp_path)
        builder.stdin.close()
    assert (found.holder, found.removable) == (f"process {builder.pid} on {HOST}", False)


@pytest.mark.parametrize("name", ["op_0123456789abcdef", "op_0123456789abcdef.killed.x_1"])
def test_find_leaves_out_locks_of_torch_under_our_own_which_nobody_waits_for(tmp_path, name):
    left_lock(tmp_path / name)
    assert locks.find(tmp_path) == []
