# SPDX-License-Identifier: Apache-2.0
"""Swapped states in trouble: full disks, damaged files, checkpoints that do not fit; and in use.

What goes wrong on one rank is an error on both, and nothing that was saved or trained is lost.
"""

import copy
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from damages import cut
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
)
from full_disk import file_size_limit
from log_lines import warned
from needs import need_nvme
from nests import assert_same, difference
from nvme_worker import (
    BF16_MASTERS,
    MUON,
    TowerWithAMatrix,
    held_everywhere,
    make_tower,
    nvme_config,
    swapped_in,
    swapper_of,
)
from ranks import error_of, run_ranks
from zero_worker import MOMENTS, base_optimizer, train

from zero8.deepspeed import swap_file
from zero8.files.manifest import MANIFEST

# DeepSpeed's aio is built by a first run; a build that is interrupted leaves a lock behind.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RANK = int(os.environ.get("RANK", 0))
BEFORE, AFTER = 2, 2


def first_state_file(folder):
    return min(Path(folder).glob("zero8-*"))


def zero_a_block(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))


def expect(error, kind, *parts):
    assert error and error[0] == kind and all(part in error[1] for part in parts), error


def expect_of_rank_1(error, what, kind, *parts):
    """Check that rank 1 says what has happened to it, and rank 0 what the other could not do."""
    if RANK == 1:
        expect(error, kind, *parts)
    else:
        expect(error, "OSError", f"1 other rank(s) could not {what}")


def exchange(path):
    """Put another sub-group's state there: whole, of the same step, and of the same size."""
    other = max(path.parent.glob("zero8-*"))
    assert other != path
    shutil.copyfile(other, path)


# What happens to a file, the error, and what it says.
DAMAGES = {
    "cut": (cut, "ValueError", ""),
    "cut to nothing": (lambda path: os.truncate(path, 0), "ValueError", ""),
    "gone": (os.remove, "FileNotFoundError", ""),
    "zeroed": (zero_a_block, "ValueError", ""),
    "of something else": (lambda path: path.write_bytes(b"?" * 4096), "ValueError", ""),
}
NOT_OURS = "it is whole, but of step {} and not what this run wrote"


# --- One pair of ranks that meets everything -----------------------------------------------------


def read_damaged(engine, stale):
    """Read damaged state files, which are whole again afterwards; `stale` is of a step before."""
    path = first_state_file(swapper_of(engine).swap_folder)
    whole = path.read_bytes()
    assert stale != whole
    number = next(
        number
        for number, p in enumerate(engine.optimizer.fp32_partitioned_groups_flat)
        if swapper_of(engine).state_path(p) == str(path)
    )
    wrong = {
        "stale": (lambda path: path.write_bytes(stale), "ValueError", NOT_OURS.format(1)),
        "of another sub-group": (exchange, "ValueError", NOT_OURS.format(2)),
    }
    for damage, kind, message in (DAMAGES | wrong).values():
        damage(path)
        error = error_of(swapped_in(engine.optimizer, number).__enter__)
        engine.optimizer._release_swap_buffers(number)
        path.write_bytes(whole)
        expect(error, kind, str(path), message)


def load_damaged(engine, folder):
    """Load a checkpoint that is damaged on rank 1, without a manifest; and parts of a good one."""
    for pattern, damage, kind, _ in (
        *(("zero8-*", *damage) for damage in DAMAGES.values()),
        ("[0-9]*", *DAMAGES["cut"]),  # weights
    ):
        if RANK == 1:
            shutil.copytree(f"{folder}/good", f"{folder}/bad")
            os.remove(f"{folder}/bad/{MANIFEST}")  # with it, less would be looked at here
            files = Path(folder, "bad", "offloaded_tensors").glob(f"rank*1/{pattern}")
            damage(min(files))
        torch.distributed.barrier()
        error = error_of(engine.load_checkpoint, folder, tag="bad")
        expect_of_rank_1(error, "load the checkpoint", kind, "offloaded_tensors", ".tensor.swp")
        torch.distributed.barrier()
        if RANK == 1:
            shutil.rmtree(f"{folder}/bad")
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        error = error_of(engine.load_checkpoint, folder, tag="good", **options)
        expect(error, "ValueError", "can only load all")


def give_newer(engine):
    """Put a state where DeepSpeed's `load_state_dict` would: it is newer than its file."""
    zero, states = engine.optimizer, base_optimizer(engine).state
    for expected, added in ((BEFORE, 100), (BEFORE + 100, -100)):
        with swapped_in(zero, 0) as p:
            state = copy.deepcopy(states[p])
        assert state["step"] == expected
        states[p] = state | {"step": state["step"] + added}
        zero._optimizer_states_and_gradient_swap_in(0)
        zero._optimizer_states_and_gradient_swap_out(0)


def use(engine):
    """Read and write moments and weights through DeepSpeed; train on in between."""
    p, swapper = engine.module.inner.weight, getattr(engine.optimizer, "optimizer_swapper", None)
    local = safe_get_local_optimizer_state(p, "exp_avg")
    before = local.clone()
    read = {which: safe_get_full_optimizer_state(p, which).clone() for which in MOMENTS}
    train(engine, 1, first=BEFORE)
    if swapper:  # other sub-groups use the buffer of what was read; without a disk it is live
        assert_same(local.clone(), before)
        assert before.abs().max() > 0
    for which in MOMENTS:
        safe_set_full_optimizer_state(p, 2 * read[which], which)
        # A save may follow, which copies the file.
        assert not any(getattr(swapper, "swap_ops", {}).values())
    written = {which: safe_get_full_optimizer_state(p, which).clone() for which in MOMENTS}
    assert difference(written, read) != ""
    weight = safe_get_full_fp32_param(p).clone()
    train(engine, 1, first=BEFORE + 1)
    return read, written, weight, held_everywhere(engine)


def meet_everything(folder, pipelined):
    """Train, save, meet trouble, train on; then a disk without room for another engine."""
    checkpoints = f"{folder}/checkpoints"
    engine = make_tower(nvme_config(f"{folder}/swap", pipelined=pipelined))
    train(engine, 1)
    stale = first_state_file(swapper_of(engine).swap_folder).read_bytes()
    train(engine, BEFORE - 1, first=1)
    engine.save_checkpoint(checkpoints, tag="good")
    saved = held_everywhere(engine)
    read_damaged(engine, stale)
    if RANK == 1:
        (other,) = Path(folder, "swap").glob("**/optimizer/rank0")
        error = error_of(swap_file.lock, str(other))
        expect(error, "OSError", "give each job an nvme_path of its own")
    load_damaged(engine, checkpoints)
    give_newer(engine)
    assert_same(held_everywhere(engine), saved)
    used = use(engine)
    # More weight corrections than weights' bytes: 1.5 MB are enough for files of weights only.
    ds_config = nvme_config(f"{folder}/more", dtype=BF16_MASTERS, weight_correction_bits=8)
    with file_size_limit(1_500_000 if RANK == 1 else resource.RLIM_INFINITY):
        error = error_of(make_tower, ds_config)
    parts = ("/rank1/zero8-", "bytes are free")
    expect_of_rank_1(error, "take the disk space", "OSError", *parts)
    in_memory = make_tower(nvme_config(None))
    train(in_memory, BEFORE)
    assert_same(use(in_memory), used)
    if RANK == 1:
        cut(first_state_file(swapper_of(engine).swap_folder))
    # Rank 0 has nothing to complain of, and would wait for weights that rank 1 does not send.
    parts = ("rank1/zero8-", "cut short")
    expect_of_rank_1(error_of(train, engine, 1), IN_STEP, "ValueError", *parts)


IN_STEP = "swap its optimizer states during a step"


def meet_a_damaged_file_of_muon(folder, number):
    """Take a step of which one rank cannot read a sub-group, between exchanges of matrices."""
    engine = make_tower(nvme_config(f"{folder}/swap", pipelined=number == 1, **MUON))
    train(engine, 1)
    files = sorted(Path(swapper_of(engine).swap_folder).glob("zero8-*"))
    assert len(files) == 3
    if RANK == 1:
        cut(files[number])
    expect_of_rank_1(error_of(train, engine, 1), IN_STEP, "ValueError", "zero8-")


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
def test_zero3_nvme_trouble_of_one_rank_is_an_error_on_both_and_changes_nothing(
    pipelined, tmp_path
):
    """Not in standing ranks: no one knows what is left of processes that have met all this."""
    need_nvme()
    kwargs = {"folder": str(tmp_path), "pipelined": pipelined}
    run_ranks(meet_everything, 2, tmp_path, timeout_s=550, **kwargs)


@pytest.mark.parametrize("number", range(3))
def test_zero3_nvme_step_of_muon_that_one_rank_cannot_take_is_an_error_on_both(tmp_path, number):
    """Ranks that exchange matrices wait for each other within the step, too.

    Two sub-groups are Muon's, the last is AdamW's, which exchanges nothing.
    """
    need_nvme()
    kwargs = {"folder": str(tmp_path), "number": number}
    run_ranks(meet_a_damaged_file_of_muon, 2, tmp_path, timeout_s=300, **kwargs)


# --- Fresh processes over what the first ones left -----------------------------------------------


def save(folder):
    engine = make_tower(nvme_config(f"{folder}/swap"), TowerWithAMatrix)
    train(engine, BEFORE)
    engine.save_checkpoint(f"{folder}/checkpoints", tag="good")
    return decoded(engine)


def load_into(folder, **options):
    """Load into an optimizer with other settings; return what it holds, and train on."""
    engine = make_tower(nvme_config(f"{folder}/swap", **options), TowerWithAMatrix)
    with warned() as lines:
        engine.load_checkpoint(f"{folder}/checkpoints", tag="good")
        loaded = decoded(engine)
        assert len(set(train(engine, AFTER, first=BEFORE))) == AFTER
    assert any("were saved with" in line for line in lines) == (RANK == 0)
    return loaded


def decoded(engine):
    """Return the moments of all sub-groups in float32."""
    zero, found = engine.optimizer, []
    for number in range(len(zero.fp16_groups)):
        with swapped_in(zero, number) as p:
            state = base_optimizer(engine).state[p]
            assert state["step"] == BEFORE
            found += [state[which].clone() for which in MOMENTS]
    return found


def test_zero3_nvme_load_with_another_codec_encodes_anew_and_says_so_on_rank_0(tmp_path):
    """In fresh processes: a checkpoint of swapped states loads in no others."""
    need_nvme()
    kwargs = {"timeout_s": 500, "folder": str(tmp_path)}
    before = run_ranks(save, 2, tmp_path, **kwargs)
    after = run_ranks(load_into, 2, tmp_path, codec="dynamic", block_size=128, **kwargs)
    for saved, loaded in zip(before, after, strict=True):
        assert difference(saved, loaded) != ""
        for values, others in zip(saved, loaded, strict=True):
            assert others.abs().max() > 0
            # Some codes of `dynamic` are as far apart as a tenth of the largest of their block.
            assert (values - others).norm() < 0.1 * values.norm()
