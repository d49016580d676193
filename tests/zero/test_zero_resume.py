# SPDX-License-Identifier: Apache-2.0
"""Save, be killed, load in fresh processes, go on: bit for bit as if nothing had happened."""

import itertools

import pytest
import torch
from nests import difference
from params import layouts_to_run
from ranks import report, run_ranks
from zero_worker import config, held, make_engine, train

BF16_MASTERS = {"bf16_master_weights_and_grads": True}
# Every cell of test_zero_matrix resumes in a fresh engine of the same process.  Fresh processes are
# for one layout of each kind of wrapper.
LAYOUTS = {
    "zero2 offload, bf16 masters": config(stage=2, dtype=BF16_MASTERS),
    "zero3 offload, bf16 masters": config(stage=3, dtype=BF16_MASTERS, stochastic_rounding="hash"),
    "no zero": config(stage=0, offload=None),
}
# `make test` resumes one; the others are slow.
every_layout = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("zero2" not in name)) for name in LAYOUTS],
)
BEFORE, AFTER = 3, 3


def train_through_and_save(folder, names):
    """Train without a break; train again, save after `BEFORE` steps; go on until killed."""
    result = {}
    for name in names:
        ds_config = LAYOUTS[name] | {"gradient_clipping": 1.0}
        engine = make_engine(ds_config)
        losses = train(engine, BEFORE + AFTER)
        result[name] = {"losses": losses[BEFORE:], **held(engine)}
        engine = make_engine(ds_config)
        train(engine, BEFORE)
        engine.save_checkpoint(folder, tag=name)
    report(result)
    for step in itertools.count(BEFORE):
        train(engine, 1, first=step)


def load_and_train(folder, names):
    """Load each checkpoint and train on."""
    result = {}
    for name in names:
        engine = make_engine(LAYOUTS[name] | {"gradient_clipping": 1.0})
        path, _ = engine.load_checkpoint(folder, tag=name)
        assert path is not None
        losses = train(engine, AFTER, first=BEFORE)
        result[name] = {"losses": losses, **held(engine)}
    return result


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Return by layout, for each rank, what went through and what was resumed."""
    folder = tmp_path_factory.mktemp("resume")
    names = layouts_to_run(request, LAYOUTS)
    kwargs = {"folder": str(folder / "checkpoints"), "timeout_s": 280, "names": names}
    through = run_ranks(train_through_and_save, 2, folder, kill=True, **kwargs)
    # Not in standing ranks: ZeRO-3 replaces torch's linear in a process for good, by one that
    # rounds bfloat16 otherwise.
    resumed = run_ranks(load_and_train, 2, folder, **kwargs)
    ranks = list(zip(through, resumed, strict=True))
    return {name: [(a[name], b[name]) for a, b in ranks] for name in names}


@every_layout
def test_resume_in_fresh_processes_is_bit_identical(runs, name):
    for through, resumed in runs[name]:
        assert difference(through, resumed) == ""


@every_layout
def test_resumed_run_has_moved_and_its_state_is_8bit(runs, name):
    """What the test above compares is not empty."""
    for rank, (_, resumed) in enumerate(runs[name]):
        losses, states = resumed["losses"], resumed["states"]
        assert len(set(losses)) == AFTER
        assert {state["step"] for state in states} == {BEFORE + AFTER}
        codes = [s["exp_avg"][0] if "pieces" in s else s.get("exp_avg_q8") for s in states]
        codes = [c for c in codes if c is not None]
        assert all(c.dtype == torch.uint8 for c in codes), rank
        assert sum(c.unique().numel() for c in codes) > 100
    (_, resumed), *_ = runs[name]
    dtype = torch.bfloat16 if "bf16 masters" in name else torch.float32
    assert resumed["states"][0]["master"].dtype == dtype
