# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its container of optimizers, and its checkpoints, whose names are flat."""

import importlib

import pytest
from fsdp_worker import differing

from zero8 import Adam8bitBlockwise

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def worker():
    """The module that makes jobs; it imports torchtitan."""
    return importlib.import_module("torchtitan_worker")


@pytest.mark.parametrize("layout", ["float32", "corrected"])
def test_checkpoint_of_one_process_loads_and_goes_on_with_the_same_bits(layout, worker, tmp_path):
    saved, end = worker.save(tmp_path, layout, alone=True)
    loaded, resumed_end = worker.resume(tmp_path, layout, alone=True)
    assert differing(loaded, saved) == []
    assert differing(resumed_end, end) == []
    assert differing(end, saved) != []
    # Both groups have kept their settings, which the schedule has changed.
    assert [loaded[name]["weight_decay"] for name in ("odd", "vector")] == [0.1, 0.0]
    assert len({group["odd"][key] for group in (loaded, end) for key in ("lr", "initial_lr")}) == 3


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_checkpoint_of_two_ranks_loads_on_two_and_on_one_with_the_same_bits(
    mode, worker, standing_ranks, tmp_path
):
    run = standing_ranks(2).run
    before = run(worker.save, folder=tmp_path, layout="corrected", mode=mode)
    after = run(worker.resume, folder=tmp_path, layout="corrected")
    for ours, theirs in zip(after, before, strict=True):
        for got, expected in zip(ours, theirs, strict=True):
            assert differing(got, expected) == []
    alone = worker.resume(tmp_path, "corrected", alone=True)
    for got, expected in zip(alone, before[0], strict=True):
        assert differing(got, expected, 1, 2) == []


def adamw_job(worker, folder):
    job = worker.job(folder, "float32", alone=True, name="AdamW")
    job.train(0, worker.STEPS)
    assert job.checkpoints.save(worker.STEPS)
    return job


def test_checkpoint_of_adamw_loads_in_fp32_only_and_else_changes_no_state(worker, tmp_path):
    job = worker.job(tmp_path, "float32", alone=True)
    job.train(0, 1)
    before = job.bits()
    saved = adamw_job(worker, tmp_path).optimizers.state_dict()
    with pytest.raises(ValueError, match='got no state.*loads only with state_dict_format="fp32"'):
        job.optimizers.load_state_dict(saved)
    assert differing(job.bits(), before) == []


def test_checkpoint_of_adamw_loads_with_the_bits_of_load_state_dict(worker, tmp_path):
    adamw = adamw_job(worker, tmp_path)
    job = worker.job(tmp_path, "float32", alone=True, state_dict_format="fp32")
    assert job.checkpoints.load()
    (optimizer,), (theirs,) = job.optimizers, adamw.optimizers
    expected = Adam8bitBlockwise(theirs.param_groups)
    expected.load_state_dict(theirs.state_dict())
    optimizer.state_dict_format = "8bit"
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    ours, wanted = (o.state_dict()["state"] for o in (optimizer, expected))
    assert differing(*(dict(zip(names, s.values(), strict=True)) for s in (ours, wanted))) == []
    assert job.bits()["odd"]["step"] == worker.STEPS
