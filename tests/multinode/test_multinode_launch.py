# SPDX-License-Identifier: Apache-2.0
"""What the launchers share, on one host: who a rank is, how it ends, and what a job makes of it."""

import ast
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from lab import REPOSITORY
from ranks import free_port

LAUNCH = REPOSITORY / "launch"
sys.path.insert(0, str(LAUNCH))
import job as job_module  # noqa: E402
import rank as rank_module  # noqa: E402

SCRIPTS = ("deepspeed.sh", "torchrun.sh", "mpirun.sh", "slurm.sbatch")
every_script = pytest.mark.parametrize("script", SCRIPTS)


def launched(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    env = {
        "PYTHON": sys.executable,
        "MPIRUN": "true",
        "HOSTFILE": str(LAUNCH / "hostfile.example"),
        **env,
    }
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- Scripts -------------------------------------------------------------------------------------


@every_script
def test_script_help_names_its_settings_and_ends_with_0(script):
    result = launched(script, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: ")
    for name in ("--dry-run", "HOSTFILE", "RUN_DIR", "TIMEOUT_S", "MASTER_ADDR"):
        assert name in result.stdout


@every_script
def test_script_dry_run_prints_a_command_with_the_script_and_its_arguments(script, tmp_path):
    version = tmp_path / "mpirun"
    version.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    version.chmod(0o755)
    result = launched(
        script, "--dry-run", "train.py", "two words", MPIRUN=str(version), TIMEOUT_S="77"
    )
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout.splitlines()[-1])
    if script == "torchrun.sh":  # what each host runs
        assert shlex.split(words[-1])[-2:] == ["train.py", "two words"]
        assert "TIMEOUT_S=77" in shlex.split(words[-1])
    else:
        assert words[-2:] == ["train.py", "two words"]
        assert words[words.index("--timeout-s") + 1] == "77"
    assert words[:2] == [sys.executable, str(LAUNCH / "job.py")]


@every_script
@pytest.mark.parametrize("arguments", [[], ["--wrong", "train.py"]], ids=["none", "unknown"])
def test_script_with_wrong_arguments_ends_with_2_and_says_what_is_expected(script, arguments):
    result = launched(script, *arguments)
    assert result.returncode == 2
    assert "expected" in result.stderr


@pytest.mark.parametrize(
    ("argument", "status", "words"),
    [("--help", 0, "usage: launch/local.sh"), ("--dry-run", 0, "--engine"), ("x", 2, "expected")],
)
def test_script_for_one_host_has_the_same_arguments(argument, status, words):
    result = launched("local.sh", argument, DS_ACCELERATOR="cpu")
    assert result.returncode == status
    assert words in result.stdout + result.stderr


HOSTFILES = {
    "no slots": ("node0\n", "expected HOST slots=RANKS"),
    "zero slots": ("node0 slots=0\n", "expected HOST slots=RANKS"),
    "twice": ("node0 slots=1\nnode0 slots=2\n", "names node0 twice"),
    "empty": ("# nothing\n\n", "names no host"),
    "command": ("node0 slots=1 $(touch x)\n", "expected HOST slots=RANKS"),
}


@pytest.mark.parametrize(("text", "message"), HOSTFILES.values(), ids=HOSTFILES)
def test_hostfile_that_is_wrong_is_refused(text, message, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(text)
    result = launched("deepspeed.sh", "--dry-run", "train.py", HOSTFILE=str(path))
    assert result.returncode == 2
    assert message in result.stderr


def test_hostfile_that_is_missing_says_what_to_copy(tmp_path):
    result = launched("deepspeed.sh", "--dry-run", "train.py", HOSTFILE=str(tmp_path / "none"))
    assert result.returncode == 2
    assert "hostfile.example" in result.stderr


def test_hostfile_of_unequal_slots_is_refused_by_torchrun(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two\nnode0 slots=2\n\nnode1 slots=1 # one\n")
    result = launched("torchrun.sh", "--dry-run", "train.py", HOSTFILE=str(path))
    assert result.returncode == 2
    assert "same slots" in result.stderr
    assert launched("deepspeed.sh", "--dry-run", "x.py", HOSTFILE=str(path)).returncode == 0


# --- Who a rank is -------------------------------------------------------------------------------

ENVIRONMENTS = {
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        ("3", "4", "1", "2"),
    ),
    "deepspeed": (
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
        ("3", "4", "1", "2"),
    ),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        ("3", "4", "1", "2"),
    ),
    "mpich": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        ("3", "4", "1", "2"),
    ),
    "slurm": (
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
        ("3", "4", "1", "1"),
    ),
    "torchrun in slurm": (
        {
            "SLURM_PROCID": "1",
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": "0",
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
        },
        ("3", "4", "1", "2"),
    ),
}


@pytest.mark.parametrize(("environ", "expected"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_environment_of_every_launcher_says_who_the_rank_is(environ, expected):
    found = rank_module.environment(environ, "", 4)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert tuple(found[name] for name in names) == expected
    assert "MASTER_ADDR" not in found


def test_environment_with_a_master_names_it():
    found = rank_module.environment(ENVIRONMENTS["slurm"][0], "node0:29500", 4)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node0", "29500")


def test_environment_of_a_world_of_another_size_raises():
    with pytest.raises(ValueError, match="has 4 rank.s., expected 8"):
        rank_module.environment(ENVIRONMENTS["mpich"][0], "", 8)


def test_environment_without_a_launcher_raises():
    with pytest.raises(ValueError, match="no launcher has said who this rank is"):
        rank_module.environment({"RANK": "0"}, "", 0)


LOGS = {
    "exception": ("Traceback\n  File x\nValueError: got 3\n", "ValueError: got 3"),
    "torch": ("[rank1]: RuntimeError: gloo\nwarning: late\n", "RuntimeError: gloo"),
    "dotted": (
        "torch.distributed.DistNetworkError: no\n",
        "torch.distributed.DistNetworkError: no",
    ),
    "none": (
        "step 1\nSegmentation fault\n\n",
        "no error in its log, which ends: Segmentation fault",
    ),
    "empty": ("", "no error in its log, which ends:"),
}


@pytest.mark.parametrize(("text", "expected"), LOGS.values(), ids=LOGS)
def test_last_error_is_the_line_that_names_one(text, expected, tmp_path):
    path = tmp_path / "log"
    path.write_text(text)
    assert rank_module.last_error(path) == expected


# --- Ranks and jobs, on this host ----------------------------------------------------------------


def rank_command(tmp_path: Path, script: str, *options: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    rank = [sys.executable, str(LAUNCH / "rank.py"), "--run-dir", str(tmp_path / "run"), *options]
    return [*rank, str(path), "one", "two words"]


ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
# All that launch/run_script.py uses of torch, whose import takes seconds.
STAND_IN = """
def rendezvous(): pass
def _new_process_group_helper(timeout): pass
"""


@pytest.fixture
def without_torch(tmp_path, monkeypatch):
    """For ranks whose scripts make no process group."""
    folder = tmp_path / "stand_in" / "torch" / "distributed"
    folder.mkdir(parents=True)
    (folder / "distributed_c10d.py").write_text(STAND_IN)
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    paths = [str(tmp_path / "stand_in"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def run_rank(tmp_path, script, *options, **env):
    return subprocess.run(
        rank_command(tmp_path, script, *options),
        env={**os.environ, **ONE_RANK, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.usefixtures("without_torch")
def test_rank_hands_the_script_its_arguments_output_and_status(tmp_path):
    result = run_rank(tmp_path, "import sys; print(sys.argv[1:], __name__); sys.exit(5)")
    assert result.returncode == 5
    assert "['one', 'two words'] __main__\n" in result.stdout
    assert "ended, status 5" in result.stdout
    (log,) = (tmp_path / "run").iterdir()
    assert log.read_text() == "['one', 'two words'] __main__\n"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("kind", ["script", "module"])
def test_rank_script_finds_its_own_modules_and_none_of_launch(tmp_path, kind):
    """The folder of a script comes first, the current one for a module, as Python has it."""
    (tmp_path / "rank.py").write_text("print('mine')")
    code = "import rank, sys; print(sys.path.count(sys.argv[1]))"
    command = rank_command(tmp_path, code)[:-3]
    what = [str(tmp_path / "script.py")] if kind == "script" else ["-m", "script"]
    result = subprocess.run(
        [*command, *what, str(LAUNCH)],
        env={**os.environ, **ONE_RANK},
        cwd=tmp_path if kind == "module" else "/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout
    assert "mine\n0\n" in result.stdout


@pytest.mark.usefixtures("without_torch")
def test_rank_finds_the_modules_of_the_checkout_from_any_folder(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(LAUNCH, checkout / "launch")
    (checkout / "found.py").write_text("print('found')")
    command = [sys.executable, str(checkout / "launch" / "rank.py"), "-m", "found"]
    result = subprocess.run(
        command,
        env={**os.environ, **ONE_RANK},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "found\n" in result.stdout, result.stdout + result.stderr


BINDINGS = {
    "one": ({}, slice(0, None)),
    "first of two": ({"LOCAL_WORLD_SIZE": "2"}, slice(0, 1)),
    "second of two": ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, slice(1, 2)),
    "more than cores": ({"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "2"}, slice(0, 1)),
}


@pytest.mark.parametrize(("env", "expected"), BINDINGS.values(), ids=BINDINGS)
def test_rank_binds_itself_to_its_share_of_the_cores(env, expected):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    found = bound_in_a_process(cores, cores, env)
    assert found == (cores[expected], str(len(cores[expected])))


def test_rank_that_its_launcher_has_bound_stays_so():
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    assert bound_in_a_process(cores, cores[1:], {"LOCAL_WORLD_SIZE": "2"}) == (cores[1:], "1")


def bound_in_a_process(of_launcher: list, of_rank: list, env: dict) -> tuple[list, str]:
    """Return the cores and threads of a rank whose launcher, and which itself, had these cores."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import rank\n"
        f"os.sched_setaffinity(os.getppid(), {of_launcher}); os.sched_setaffinity(0, {of_rank})\n"
        f"rank._bind_cores({env.get('LOCAL_RANK', 0)}, {env.get('LOCAL_WORLD_SIZE', 1)})\n"
        "print([sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS']])"
    )
    launcher = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, sys.argv[1]])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", launcher, str(LAUNCH)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return tuple(ast.literal_eval(done.stdout))


def test_rank_limits_every_group_that_the_script_makes(tmp_path):
    """The second as well, which gets no limit of its own, and one that asks for less keeps it."""
    script = """
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
less = dist.new_group(timeout=timedelta(seconds=3))
for group in (None, dist.new_group(), dist.new_group(timeout=timedelta(hours=9)), less):
    group = group or c._get_default_group()
    print("limit", group._get_backend(c.torch.device("cpu")).options._timeout.total_seconds())
"""
    result = run_rank(tmp_path, script, "--timeout-s", "7")
    assert result.returncode == 0, result.stdout
    limits = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("limit")]
    assert limits == ["7.0", "7.0", "7.0", "3.0"]


@pytest.mark.usefixtures("without_torch")
def test_rank_ends_when_nobody_listens_any_more(tmp_path):
    """As behind an ssh whose client is gone: the rank prints nothing that could fail."""
    process = subprocess.Popen(
        rank_command(tmp_path, "import time; time.sleep(600)"),
        env={**os.environ, **ONE_RANK},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(process.stdout.readline().split("process ")[1].split(",")[0])
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGKILL
        assert is_gone(pid)
    finally:
        process.kill()
        process.wait()


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; whoever adopted it may not have noticed yet."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("without_torch")
def test_rank_that_leaves_a_process_behind_ends_it(tmp_path):
    script = "import subprocess; print('left', subprocess.Popen(['sleep', '600']).pid)"
    result = run_rank(tmp_path, script)
    assert result.returncode == 0
    pid = int(result.stdout.split("left ")[1].split()[0])
    assert is_gone(pid)


def job_of(script: str, *options: str) -> subprocess.CompletedProcess:
    """Run a shell script as the launcher of a job."""
    return subprocess.run(
        [sys.executable, str(LAUNCH / "job.py"), *options, "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
    )


def said(rank: int, status: int, world_size: int = 2) -> str:
    host = f"node{rank}"
    words = f"status {status}" + (f": because {rank} (log)" if status else "")
    return f"echo 'node: zero8: rank {rank} of {world_size} on {host}: ended, {words}';"


def began(rank: int, world_size: int = 2) -> str:
    return f"echo 'zero8: rank {rank} of {world_size} on node{rank}: started, process 1, log x';"


BOTH = began(0) + began(1)
# What a launcher does: options, script, status of the job, words of its report.
JOBS = {
    "well": ([], BOTH + said(0, 0) + said(1, 0), 0, "all 2 rank(s) ended well"),
    "launcher says 0 of a rank that failed": (
        [],
        BOTH + said(1, 9) + said(0, 0),
        9,
        "rank 1 on node1: status 9: because 1 (log)",
    ),
    "first failure counts": ([], BOTH + said(1, 9) + said(0, 1) + "exit 4", 9, "exit status 9"),
    "failure of another is heard first": (
        [],
        BOTH
        + "echo 'zero8: rank 0 of 2 on node0: ended, status 1: Connection closed by peer (log)';"
        + said(1, 9),
        9,
        "exit status 9\nzero8:   rank 1 on node1: status 9: because 1 (log)\nzero8:   rank 0",
    ),
    "launcher fails": ([], BOTH + said(0, 0) + said(1, 0) + "exit 4", 4, "exit status 4"),
    "launcher killed": ([], BOTH + "kill -9 $$", 137, "is node0 up?"),
    "rank silent": ([], BOTH + said(0, 0), 1, "rank 1 on node1: no word since it started"),
    "rank missing": (
        ["--ranks", "3", "--hosts", "node0,node1,node2"],
        BOTH + said(0, 0) + said(1, 0),
        1,
        "rank 2: not started; no word from node2",
    ),
    "host lost": (
        ["--grace-s", "1", "--ranks", "2", "--hosts", "node0,node1"],
        began(0) + "echo 'pdsh@node0: node1: ssh exited with exit code 255'; sleep 600",
        143,
        "rank 1: not started; no word from node1: ssh to node1 ended with 255",
    ),
    "none started": ([], "echo hello", 1, "no rank was started"),
    "others hang": (["--grace-s", "1"], BOTH + said(1, 9) + "sleep 600", 9, "exit status 9"),
    "launcher ignores signals": (
        ["--grace-s", "0"],
        "trap '' TERM;" + BOTH + said(1, 9) + "while :; do sleep 1; done",
        9,
        "exit status 9",
    ),
    "started again": (
        ["--restarts", "--grace-s", "1"],
        BOTH + said(1, 9) + said(0, 1) + BOTH + "sleep 2;" + said(0, 0) + said(1, 0) + "exit 255",
        0,
        "all 2 rank(s) ended well",
    ),
    "fewer go on": (
        ["--restarts", "--grace-s", "1"],
        BOTH + said(1, 9) + said(0, 1) + began(0, 1) + said(0, 0, 1),
        0,
        "all 1 rank(s) ended well",
    ),
    "not started again": (
        ["--restarts", "--grace-s", "1"],
        BOTH + said(1, 9) + said(0, 1) + "sleep 600",
        9,
        "exit status 9",
    ),
}


# The launcher is killed after ten seconds.
SLOW_JOBS = ["launcher ignores signals"]


@pytest.mark.parametrize(
    ("options", "script", "status", "words"),
    [
        pytest.param(*job, id=name, marks=[pytest.mark.slow] * (name in SLOW_JOBS))
        for name, job in JOBS.items()
    ],
)
def test_job_status_and_report(options, script, status, words):
    result = job_of(script, *options)
    assert result.returncode == status, result.stdout
    assert words in result.stdout


def test_job_ends_what_its_launcher_has_left_behind():
    result = job_of(BOTH + said(0, 0) + said(1, 0) + "setsid sleep 600 & echo left $!")
    assert result.returncode == 0, result.stdout
    pid = int(result.stdout.split("left ")[1].split()[0])
    assert is_gone(pid)


def test_words_behind_what_a_launcher_puts_before_a_line_are_heard():
    words = job_module.Words()
    words.hear("x [default0]:zero8: rank 7 of 16 on a-b.c: ended, status 3: why: (log)")
    assert words.failures == [(7, "a-b.c", 3, "why: (log)")]


def test_job_arguments_without_a_command_are_refused():
    result = subprocess.run(
        [sys.executable, str(LAUNCH / "job.py")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "expected a command" in result.stderr


@pytest.mark.slow
def test_rank_whose_world_does_not_come_together_ends_within_the_limit(tmp_path):
    script = "import torch.distributed as dist; dist.init_process_group('gloo')"
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # A sign of life a second: on a busy machine one of two may be late.
    result = run_rank(tmp_path, script, "--timeout-s", "6", **env)
    assert result.returncode == 1
    assert "1/2 clients joined" in result.stdout
