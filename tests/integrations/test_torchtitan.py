# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its container of optimizers, and its checkpoints, whose names are flat."""

import importlib
from importlib.util import find_spec

import pytest
import torch
from fsdp_worker import differing
from needs import need
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from zero8 import Adam8bitBlockwise

pytestmark = pytest.mark.integrations

# Its own requirements take older datasets than transformers does here, and much that is not used.
NO_TORCHTITAN = (
    "no torchtitan: pip install --no-deps torchtitan==0.3.0 tyro docstring-parser spmd-types==0.2.3"
)


@pytest.fixture(scope="module")
def worker():
    """The module that makes jobs; it imports torchtitan."""
    need(None if find_spec("torchtitan") else NO_TORCHTITAN)
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


def test_checkpoint_has_codes_under_the_flat_names_of_torch(worker, tmp_path):
    job = worker.job(tmp_path, "float32", alone=True)
    job.train(0, worker.STEPS)
    assert job.checkpoints.save(worker.STEPS)
    (optimizer,) = job.optimizers
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = set(get_optimizer_state_dict(job.model, optimizer, options=options))
    names = {name for name in flat if not name.endswith(".param_names")}
    assert set(job.optimizers.state_dict()) == names

    written = FileSystemReader(tmp_path / "checkpoint" / f"step-{worker.STEPS}").read_metadata()
    entries = written.state_dict_metadata
    assert {f"optimizer.{name}" for name in names} <= entries.keys()
    for moment in ("exp_avg", "exp_avg_sq"):
        codes = entries[f"optimizer.state.odd.{moment}_q8"]
        assert (codes.properties.dtype, codes.size) == (torch.uint8, (33, 512))
        assert f"optimizer.state.odd.{moment}" not in entries


def test_state_dict_before_the_first_step_leaves_parameters_as_they_are(worker, tmp_path):
    """torchtitan makes states by a step with an lr and gradients of zero."""
    job = worker.job(tmp_path, "corrected", alone=True)
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    assert "state.odd.exp_avg_q8" in job.optimizers.state_dict()
    for name, p in job.model.named_parameters():
        assert torch.equal(p, before[name]), name


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
