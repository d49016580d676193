# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/ train, save, resume and print what the optimizer holds."""

import re
import sys

import pytest
from places import ROOT
from processes import run
from ranks import build_ops, free_port

SCRIPTS = ("deepspeed_zero2_offload", "fsdp2_offload")
# Compiling DeepSpeed's all_reduce over shared memory, which two ranks do not need, takes a minute.
RUN = """
import runpy, sys
if "deepspeed" in sys.argv[1]:
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module", autouse=True)
def ops():
    """Build the ops here: the time limits are for the examples."""
    build_ops()


@pytest.fixture
def example(forks, tmp_path):
    """Return a function that runs a script to its end and returns its losses by step."""
    runner = tmp_path / "runner.py"
    runner.write_text(RUN)

    def losses(script, *launcher, **env):
        arguments = [str(ROOT / "examples" / f"{script}.py"), "--out", str(tmp_path / "out")]
        env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": None}
        if launcher:
            done = run([sys.executable, *launcher, str(runner), *arguments], **env)
        else:
            done = forks.run(RUN, *arguments, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("state bytes per element") == 2, done.stdout
        printed = re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.MULTILINE)
        return {int(step): float(loss) for step, loss in printed}

    return losses


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_on_one_rank_trains_and_saves(example, tmp_path, script):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    losses = example(script, MASTER_PORT=str(free_port()), **world)
    assert list(losses) == [0, 10]
    assert losses[10] < losses[0]
    assert (tmp_path / "out" / "latest").is_file()
    assert list((tmp_path / "out").glob("*/zero8_manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_on_two_ranks_started_again_resumes(example, script):
    first, second = example(script, *TORCHRUN), example(script, *TORCHRUN)
    assert (list(first), list(second)) == ([0, 10], [20, 30])
    assert second[20] < first[10]
