# SPDX-License-Identifier: Apache-2.0
"""Jobs on two hosts to which something happens: all end in time, say where, and leave nothing.

Each job adds numbers up over both ranks (loop.py); TIMEOUT_S and GRACE_S are a few seconds.
"""

from pathlib import Path

import pytest
from jobs import LAUNCHERS, LOOP, OVER_SSH, STAYS_WHERE_CUT_OFF

pytestmark = pytest.mark.multinode

every_launcher = pytest.mark.parametrize("launcher", LAUNCHERS)


@pytest.fixture
def loop(job):
    """Return a function that starts loop.py by a launcher."""

    def start(launcher, *arguments, **env):
        script, settings = LAUNCHERS[launcher]
        return job(script, LOOP, *arguments, **settings, **env)

    return start


def failed_first(output: str) -> str:
    """Return what the job says of the rank that failed first."""
    lines = output.partition("the job failed after")[2].splitlines()
    return next((line for line in lines if "  rank " in line), "")


@every_launcher
def test_job_without_a_fault_ends_with_0_and_logs_of_every_rank(loop, launcher):
    job = loop(launcher, 5)
    assert job.status() == 0, job.output()
    # 0 + 1 at the first of 5 steps, 2 more at each.
    assert "sum 25, threads 1" in job.output()
    assert "all 2 rank(s) ended well" in job.output()
    logs = {path.name: path.read_text() for path in job.run_dir.iterdir()}
    assert sorted(logs) == ["node-node0-rank-0.log", "node-node1-rank-1.log"]
    assert all("sum 25" in text for text in logs.values())


@every_launcher
def test_job_whose_rank_exits_returns_its_status_and_names_the_host(loop, launcher):
    job = loop(launcher, 10_000, "exit", 1, 3)
    assert job.status() == 17, job.output()
    assert "rank 1 on node1: status 17" in job.output()


@every_launcher
def test_job_whose_rank_is_killed_says_so(loop, launcher):
    job = loop(launcher, 10_000, "kill", 1, 3)
    assert job.status() != 0
    assert "rank 1 on node1: status 137: killed by SIGKILL" in job.output()


@every_launcher
def test_job_whose_rank_hangs_ends_within_the_limit(loop, launcher):
    job = loop(launcher, 10_000, "stop", 1, 3)
    assert job.status() != 0
    assert "rank 1 on node1: status 124: no sign of life for 15 s" in job.output()


@every_launcher
@pytest.mark.parametrize("fault", ["power_off", "unplug"])
def test_job_whose_host_is_gone_ends_within_the_limit(loop, lab, launcher, fault):
    job = loop(launcher, 10_000)
    job.wait_for("step 3\n")
    getattr(lab, fault)("node1")
    assert job.status(may_stay=STAYS_WHERE_CUT_OFF.get(launcher, "")) != 0
    assert "rank 1 on node1: no word since it started: " in job.output()
    assert "rank 0 on node0: status 1" in failed_first(job.output())


def test_rank_that_raises_is_told_by_its_exception(loop):
    job = loop("deepspeed", 10_000, "raise", 1, 3)
    assert job.status() == 1
    told = "rank 1 on node1: status 1: RuntimeError: this rank was told to fail"
    assert told in failed_first(job.output())


def test_launcher_that_is_killed_leaves_no_rank_behind(loop, lab):
    """DeepSpeed's runner returns 0 when its pdsh is killed, and leaves the ranks alone."""
    job = loop("deepspeed", 10_000)
    job.wait_for("step 3\n")
    pdsh = [p for p in lab.processes("node0") if "pdsh" in Path(p.cmdline()[0]).name]
    assert pdsh
    for process in pdsh:
        process.kill()
    assert job.status() != 0, job.output()


def test_job_that_is_interrupted_ends_all_ranks(loop, lab):
    job = loop("torchrun", 10_000)
    job.wait_for("step 3\n")
    for process in lab.processes("node0"):
        if any(argument.endswith("job.py") for argument in process.cmdline()):
            process.terminate()
            break
    assert job.status() == 128 + 15, job.output()


@pytest.mark.parametrize("launcher", OVER_SSH)
def test_job_with_a_host_that_does_not_exist_names_it_at_once(loop, launcher, lab):
    hostfile = lab.folder / "wrong"
    hostfile.write_text("node0 slots=1\nnode9 slots=1\n")
    job = loop(launcher, 5, HOSTFILE=str(hostfile))
    assert job.status(timeout_s=60) == 2
    assert "node9" in job.output()
    assert "cannot run on the host(s) named above" in job.output()


def test_job_with_a_host_without_sshd_names_it_at_once(loop, lab):
    for process in lab.sshd("node1"):
        process.suspend()  # accepts connections and says nothing: the worse case
    try:
        job = loop("deepspeed", 5)
        assert job.status(timeout_s=60) == 2
    finally:
        for process in lab.sshd("node1"):
            process.resume()
    assert "node1" in job.output()


def test_job_with_a_host_that_refuses_the_key_names_it_at_once(loop, lab):
    with lab.another_key():
        job = loop("torchrun", 5)
        assert job.status(timeout_s=60) == 2
    assert "Permission denied" in job.output()
    assert "cannot run on the host(s) named above" in job.output()


def test_job_on_four_hosts_of_several_ranks_names_the_one_that_fails(four_hosts, four_host_job):
    """5 ranks: hosts of one rank and of two, in the order of the hostfile."""
    hostfile = four_hosts.folder / "hostfile"
    hostfile.write_text("".join(f"node{i} slots={1 + (i == 2)}\n" for i in range(4)))
    job = four_host_job(LOOP, 5, HOSTFILE=str(hostfile))
    assert job.status() == 0, job.output()
    # 0 + 1 + 2 + 3 + 4 at the first of 5 steps, 5 more at each.
    assert "sum 100," in job.output()
    names = ["node0-rank-0", "node1-rank-1", "node2-rank-2", "node2-rank-3", "node3-rank-4"]
    assert sorted(path.stem for path in job.run_dir.iterdir()) == [f"node-{n}" for n in names]
    job = four_host_job(LOOP, 10_000, "kill", 3, 3, HOSTFILE=str(hostfile))
    assert job.status() == 137, job.output()
    assert "rank 3 on node2: status 137: killed by SIGKILL" in failed_first(job.output())


def test_rank_that_cannot_import_zero8_is_named_with_its_host(loop, lab):
    lab.hide("node1", "zero8")
    job = loop("deepspeed", 5)
    assert job.status() != 0
    assert "node1: ModuleNotFoundError: No module named 'zero8" in job.output()
    assert "rank 1: not started; no word from node1: ssh to node1 ended with 1" in job.output()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "openmpi"])
def test_hosts_whose_own_name_is_a_loopback_address_still_meet(loop, lab, launcher):
    """As Debian's installer writes /etc/hosts; gloo takes that address for others to connect to."""
    for host in lab.hosts:
        lab.write_hosts(host, own="127.0.1.1")
    job = loop(launcher, 5)
    assert job.status() == 0, job.output()


def test_hosts_whose_own_name_is_on_an_interface_that_leads_nowhere_still_meet(loop, lab):
    for host in lab.hosts:
        lab.write_hosts(host, own=lab.add_interface(host))
    job = loop("torchrun", 5)
    assert job.status() == 0, job.output()


def test_interface_that_leads_nowhere_is_told_by_its_name(loop, lab):
    """Making a group has a limit too, which gloo does not honour by itself."""
    for host in lab.hosts:
        lab.add_interface(host)
    job = loop("deepspeed", 5, GLOO_SOCKET_IFNAME="a0")
    assert job.status() != 0
    assert "GLOO_SOCKET_IFNAME=a0" in job.output()
