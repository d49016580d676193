# SPDX-License-Identifier: Apache-2.0
"""Who may keep swap files in a folder: one process."""

import os
import subprocess
import sys

import pytest

from zero8.deepspeed import swap_file

TAKE = "import sys; from zero8.deepspeed import swap_file; swap_file.lock(sys.argv[1])"
TAKE_AND_WAIT = f"{TAKE}; print('taken', flush=True); sys.stdin.read()"


def start(program, folder):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(120)
def test_folder_is_refused_while_another_process_has_it_and_free_when_that_is_killed(
    forks, tmp_path
):
    folder = tmp_path / "rank0"
    folder.mkdir()
    with start(TAKE_AND_WAIT, folder) as first:
        try:
            assert first.stdout.readline() == "taken\n"
            with pytest.raises(OSError, match=f"in use: process {first.pid} on .*nvme_path") as met:
                swap_file.lock(str(folder))
            assert met.value.filename == str(folder)
        finally:
            first.kill()
    swap_file.lock(str(folder))
    assert f"in use: process {os.getpid()} on " in forks.run(TAKE, str(folder)).stderr


def test_folder_that_this_process_has_is_its_own_again(tmp_path):
    folder = tmp_path / "rank0"
    folder.mkdir()
    swap_file.lock(str(folder))
    swap_file.lock(f"{tmp_path}/./rank0")
    assert list(folder.iterdir()) == []  # DeepSpeed copies all that is in it
