# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with optimizer states on a local disk, on two ranks, from the JSON config alone."""

import gc
import itertools
import operator
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from needs import need_nvme
from nests import assert_same
from nvme_worker import (
    BF16_MASTERS,
    MUON,
    SUB_GROUPS,
    SWAPPED,
    Tower,
    held_everywhere,
    make_tower,
    nvme_config,
    swapped_elements,
    swapped_in,
    swapper_of,
)
from ranks import report, run_ranks
from universal_cuts import convert, decoded, joined
from zero_worker import LION, MIX, MOMENTS, SGD, base_optimizer, train

# DeepSpeed's aio is built by a first run, which takes minutes; a build that is interrupted leaves a
# lock behind.  `make test` looks at the files only: test_zero3_nvme_file.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

PRECISIONS = {
    "fp32": {},
    "bf16": {"dtype": {"enabled": True}},
    "bf16 masters": {"dtype": BF16_MASTERS, "weight_correction_bits": 8},
    "bf16, Lion": {"dtype": {}, **LION},
    "bf16, SGD": {"dtype": {}, **SGD},
    "bf16, AdEMAMix": {"dtype": {}, **MIX},
    "bf16, Muon": {"dtype": {}, **MUON},  # sub-groups of both are swapped
}
# Other algorithms swap what AdamW does, but for Muon, whose sub-groups differ.
CELLS = [
    *((precision, False) for precision in ("fp32", "bf16", "bf16 masters", "bf16, Lion")),
    *((precision, True) for precision in PRECISIONS if precision not in ("bf16", "bf16, Lion")),
]
BEFORE, AFTER = 2, 3
CHANGED_LR, CHANGED_SCALE = 4e-3, 0.5


def train_and_save(folder, pipelined, options):
    """Train, save half way with another learning rate, train on; the same without a disk."""
    found = {}
    for name, where in (("nvme", f"{folder}/swap"), ("cpu", None)):
        engine = make_tower(nvme_config(where, pipelined=pipelined, **options))
        losses = train(engine, BEFORE)
        for group in base_optimizer(engine).param_groups:
            group["lr"] = CHANGED_LR
        engine.optimizer.loss_scaler.cur_scale = CHANGED_SCALE
        if where is not None:
            engine.save_checkpoint(f"{folder}/checkpoints", tag="half")
            places = places_of(engine)
        losses += train(engine, AFTER, first=BEFORE)
        rows = base_optimizer(engine).memory_report().to_dicts()
        found[name] = {"losses": losses, **held_everywhere(engine)}, sorted(map(str, rows))
    assert_same(found["nvme"], found["cpu"])
    held, rows = found["nvme"]
    assert_moved(held)
    assert len(rows) == len(list(Tower().named_parameters()))
    assert_in_files_only(held["states"][:SWAPPED], **places)
    report(held)
    for step in itertools.count():  # killed somewhere in here
        train(engine, 1, first=step)


def assert_moved(held):
    """Check that what has been compared is complete, and is not what it was."""
    assert len(set(held["losses"])) == BEFORE + AFTER
    assert [state["step"] for state in held["states"]] == [BEFORE + AFTER] * SUB_GROUPS
    for codes, scales, _ in (m for state in held["states"][:SWAPPED] for m in moments_in(state)):
        assert codes.dtype == torch.uint8 and codes.unique().numel() > 100
        assert scales.dtype == torch.float32 and scales.abs().max() > 0


def assert_in_files_only(states, in_memory, large, files):
    """Check that files have a quarter of float32's bytes, and 1 byte per weight correction."""
    numels = [sum(piece.numel for piece in state["pieces"]) for state in states]
    counts = [len(moments_in(state)) for state in states]  # AdamW has one more than Muon
    corrected = "param_correction" in states[0]
    expected = sum(map(operator.mul, counts, numels)) + corrected * sum(numels)
    assert (in_memory, large) == (SUB_GROUPS - SWAPPED, [])
    assert len(files) == SWAPPED
    assert expected <= sum(files) <= 1.05 * expected


def load_and_train(folder, pipelined, options):
    """Load in fresh processes and train on, over files that an earlier run left."""
    engine = make_tower(nvme_config(f"{folder}/swap", pipelined=pipelined, **options))
    engine.load_checkpoint(f"{folder}/checkpoints", tag="half")
    assert {group["lr"] for group in base_optimizer(engine).param_groups} == {CHANGED_LR}
    assert engine.optimizer.loss_scaler.cur_scale == CHANGED_SCALE
    losses = train(engine, AFTER, first=BEFORE)
    return {"losses": losses, **held_everywhere(engine)}


def train_and_write(folder):
    """Train 24-bit weights, zero a third of them from outside, and take a step."""
    held = []
    for drops in (False, True):
        engine = make_tower(nvme_config(f"{folder}/{drops}", **PRECISIONS["bf16 masters"]))
        train(engine, BEFORE)
        for p in engine.module.parameters():
            weights = safe_get_local_fp32_param(p).clone()
            weights[::3] = 0
            safe_set_local_fp32_param(p, weights)
        if drops:
            drop_corrections(engine)
        train(engine, 1, first=BEFORE)
        held.append(held_everywhere(engine))
    assert_same(*held)
    assert not any(p.isnan().any() for p in held[0]["parameters"].values())


def drop_corrections(engine):
    """Set all corrections to 0, on the disk and in memory."""
    zero = engine.optimizer
    for number in range(SUB_GROUPS):
        with swapped_in(zero, number) as p:
            base_optimizer(engine).state[p]["param_correction"].zero_()
            if number < SWAPPED:
                zero._optimizer_states_and_gradient_swap_out(number)


def moments_in(state):
    """Return what is held of each 8-bit moment: codes, scales and float32 values."""
    values = [value for key, value in state.items() if key != "pieces"]
    return [value for value in values if isinstance(value, tuple) and len(value) == 3]


def places_of(engine):
    """Return how many states are in memory, and the bytes of large uint8 storages and of files."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]
    tensors = [x for x in tensors if x.device.type == "cpu"]  # those on meta describe files
    files = Path(swapper_of(engine).swap_folder).glob("zero8-*")
    return {
        "in_memory": len(base_optimizer(engine).state),
        "large": [n for x in tensors if (n := x.untyped_storage().nbytes()) > 2**18],
        "files": [path.stat().st_size for path in files],
    }


@pytest.mark.parametrize(("precision", "pipelined"), CELLS)
def test_zero3_nvme_training_equals_cpu_offload_and_resumes_in_fresh_processes(
    precision, pipelined, tmp_path
):
    """The tail, which is too small to be swapped, included: bit for bit.

    In fresh processes, as a checkpoint of swapped states loads in no others.
    """
    need_nvme()
    kwargs = {"folder": str(tmp_path), "pipelined": pipelined, "options": PRECISIONS[precision]}
    through = run_ranks(train_and_save, 2, tmp_path, timeout_s=600, kill=True, **kwargs)
    # Less than one matrix of weights, in two bytes each, beside the files.
    sizes = [path.stat().st_size for path in tmp_path.glob("checkpoints/half/*_optim_states.pt")]
    assert len(sizes) == 2 and max(sizes) < 2 * swapped_elements() / SWAPPED
    resumed = run_ranks(load_and_train, 2, tmp_path, timeout_s=600, **kwargs)
    for expected, got in zip(through, resumed, strict=True):
        assert_same(got, expected | {"losses": expected["losses"][BEFORE:]})


def test_zero3_nvme_weights_that_a_script_writes_count_as_they_are(tmp_path):
    need_nvme()
    run_ranks(train_and_write, 2, tmp_path, timeout_s=600, folder=tmp_path)


# --- Another number of ranks ---------------------------------------------------------------------


def save_two(folder):
    """Train and save; return what this rank holds then."""
    engine = make_tower(nvme_config(f"{folder}/swap", **PRECISIONS["bf16"]))
    train(engine, BEFORE)
    engine.save_checkpoint(folder, tag="two")
    return held_everywhere(engine)


def load_one(folder):
    """Load a universal checkpoint and train on, on NVMe; the same without a disk."""
    found = []
    for where in (f"{folder}/swap of one", None):
        ds_config = nvme_config(where, **PRECISIONS["bf16"])
        engine = make_tower(ds_config | {"checkpoint": {"load_universal": True}})
        engine.load_checkpoint(folder)
        loaded = held_everywhere(engine)
        found.append({"loaded": loaded, "losses": train(engine, AFTER, first=BEFORE)})
        found[-1] |= held_everywhere(engine)
    assert_same(*found)
    return found[0]["loaded"]


def test_zero3_nvme_checkpoint_of_two_ranks_converts_for_one(tmp_path):
    """Weights are exact, and moments but in blocks that a boundary between ranks cuts."""
    need_nvme()
    old = joined(run_ranks(save_two, 2, tmp_path, timeout_s=600, folder=str(tmp_path)))
    convert(tmp_path)
    new = joined(run_ranks(load_one, 1, tmp_path, timeout_s=600, folder=str(tmp_path)))
    for name, entry in new.items():
        assert torch.equal(entry["weights"], old[name]["weights"]), name
        for got, expected in ((decoded(one, m) for one in (entry, old[name])) for m in MOMENTS):
            assert (got - expected).norm() <= 0.02 * expected.norm(), name
            assert (got == expected).float().mean() > 0.99, name
