# SPDX-License-Identifier: Apache-2.0
"""The demonstration under FSDP2: the training that DeepSpeed does, without DeepSpeed."""

import pytest
from places import FOLDERS
from ranks import free_port
from train_worker import DEEPSPEED, FSDP2, check_resumed


@pytest.mark.parametrize("engine", [DEEPSPEED, FSDP2])
def test_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(
    engine, standing_ranks, tmp_path
):
    check_resumed(standing_ranks, tmp_path, engine=engine)


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
from train_worker import row
row("fsdp2", "Adam8bitBlockwise", steps=2, out=sys.argv[1], codec="fp8")
"""


@pytest.mark.slow
def test_fsdp2_job_where_deepspeed_cannot_be_imported_trains(forks, tmp_path):
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"import sys; sys.path[:0] = {FOLDERS!r}\n{WITHOUT_DEEPSPEED}"
    done = forks.run(code, str(tmp_path), **world, **address, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
