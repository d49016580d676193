# SPDX-License-Identifier: Apache-2.0
"""What the scripts of launch/ start, on this host alone: `echo` stands for Python and mpirun."""

import os
import shutil
import subprocess

import pytest
from lab import REPOSITORY

ECHO = shutil.which("echo")


def launched(script, *arguments, **env):
    return subprocess.run(
        [str(REPOSITORY / "launch" / script), *arguments],
        env={**os.environ, "PYTHON": ECHO, "MPIRUN": ECHO, "CHECK": "0", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["deepspeed.sh", "mpirun.sh"])
def test_script_starts_ranks_on_the_hosts_of_the_hostfile(script, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# two\nnode0 slots=2\n\nnode1 slots=1\n")
    env = {"HOSTFILE": str(hostfile), "LAUNCHER_ARGS": "--more options"}
    done = launched(script, "-m", "train", "two words", **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" train two words\n") and " --more options " in done.stdout
    hosts = {"deepspeed.sh": f"--hostfile {hostfile}", "mpirun.sh": "--host node0:2,node1:1 -np 3"}
    assert hosts[script] in done.stdout and "node0" in done.stdout


HOSTFILES = {
    "no slots": ("node0\n", "expected HOST slots=RANKS"),
    "command": ("node0 slots=1 $(touch x)\n", "expected HOST slots=RANKS"),
    "empty": ("# nothing\n\n", "names no host"),
    "unequal": ("node0 slots=2\nnode1 slots=1\n", "needs the same slots on every host"),
}


@pytest.mark.parametrize(("text", "message"), HOSTFILES.values(), ids=HOSTFILES)
def test_hostfile_that_is_wrong_is_refused(text, message, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(text)
    done = launched("torchrun.sh", "train.py", HOSTFILE=str(path))
    assert done.returncode == 2
    assert message in done.stderr
