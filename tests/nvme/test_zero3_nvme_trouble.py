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
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
)
from full_disk import file_size_limit
from log_lines import warned
from needs import need_nvme
from nests import difference
from nvme_worker import (
    BF16_MASTERS,
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
from zero8.spec.adam import ADAM
from zero8.spec.codec import codec_named
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

# DeepSpeed's aio is built by a first run; a build that is interrupted leaves a lock behind.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RANK = int(os.environ.get("RANK", 0))
BEFORE, AFTER = 2, 2
MUON = {"optimizer": "Muon8bitBlockwise", "adam_params": ["*embed*", "*outer*"]}


def first_state_file(folder):
    return min(Path(folder).glob("zero8-*"))


def cut(path):
    os.truncate(path, path.stat().st_size - 4096)


def zero_a_block(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(4096))


DAMAGES = {"cut": cut, "cut to nothing": lambda path: os.truncate(path, 0), "gone": os.remove}
DAMAGES |= {"zeroed": zero_a_block, "of something else": lambda path: path.write_bytes(b"?" * 4096)}


# --- One pair of ranks that meets everything -----------------------------------------------------


def exchange(path):
    """Put another sub-group's state there: whole, of the same step, and of the same size."""
    other = max(path.parent.glob("zero8-*"))
    assert other != path
    shutil.copyfile(other, path)


def read_damaged(engine, stale):
    """Return what reading damaged state files raises; the files are whole again afterwards.

    `stale` is the file of a step before.
    """
    errors, path = {}, first_state_file(swapper_of(engine).swap_folder)
    whole = path.read_bytes()
    assert stale != whole
    number = next(
        number
        for number, p in enumerate(engine.optimizer.fp32_partitioned_groups_flat)
        if swapper_of(engine).state_path(p) == str(path)
    )
    wrong = {"stale": lambda path: path.write_bytes(stale), "of another sub-group": exchange}
    for name, damage in (DAMAGES | wrong).items():
        damage(path)
        errors[name] = error_of(swapped_in(engine.optimizer, number).__enter__)
        engine.optimizer._release_swap_buffers(number)
        path.write_bytes(whole)
    return str(path), errors


def load_damaged(engine, folder):
    """Return what loading raises when files of rank 1 are damaged, without a manifest."""
    errors = {}
    damages = {f"state {name}": ("zero8-*", damage) for name, damage in DAMAGES.items()}
    damages["weights cut"] = ("[0-9]*", cut)
    for name, (pattern, damage) in damages.items():
        if RANK == 1:
            shutil.copytree(f"{folder}/good", f"{folder}/bad")
            os.remove(f"{folder}/bad/{MANIFEST}")  # with it, less would be looked at here
            files = Path(folder, "bad", "offloaded_tensors").glob(f"rank*1/{pattern}")
            damage(min(files))
        torch.distributed.barrier()
        errors[name] = error_of(engine.load_checkpoint, folder, tag="bad")
        torch.distributed.barrier()
        if RANK == 1:
            shutil.rmtree(f"{folder}/bad")
    for options in ({"load_module_only": True}, {"load_optimizer_states": False}):
        errors[str(options)] = error_of(engine.load_checkpoint, folder, tag="good", **options)
    return errors


def give_newer(engine):
    """Put a state where DeepSpeed's `load_state_dict` would; return the steps before and after."""
    zero, states, steps = engine.optimizer, base_optimizer(engine).state, []
    for added in (100, -100):
        with swapped_in(zero, 0) as p:
            state = copy.deepcopy(states[p])
        steps.append(state["step"])
        states[p] = state | {"step": state["step"] + added}
        zero._optimizer_states_and_gradient_swap_in(0)
        zero._optimizer_states_and_gradient_swap_out(0)
    return steps


def use(engine):
    """Read and write moments and weights through DeepSpeed; train on in between."""
    p = engine.module.inner.weight
    result = {}
    local = safe_get_local_optimizer_state(p, "exp_avg")
    result["local"] = [local.clone()]
    result["full"] = {which: safe_get_full_optimizer_state(p, which).clone() for which in MOMENTS}
    train(engine, 1, first=BEFORE)
    result["local"].append(local.clone())
    for which in MOMENTS:
        safe_set_full_optimizer_state(p, 2 * result["full"][which], which)
        operations = getattr(getattr(engine.optimizer, "optimizer_swapper", None), "swap_ops", {})
        result["under way"] = [kind for kind, operation in operations.items() if operation]
    result["set"] = {which: safe_get_full_optimizer_state(p, which).clone() for which in MOMENTS}
    result["weight"] = safe_get_full_fp32_param(p).clone()
    train(engine, 1, first=BEFORE + 1)
    return result | held_everywhere(engine)


def meet_everything(folder, pipelined):
    """Train, save, meet trouble, train on; then a disk without room for another engine."""
    checkpoints = f"{folder}/checkpoints"
    engine = make_tower(nvme_config(f"{folder}/swap", pipelined=pipelined))
    losses = train(engine, 1)
    stale = first_state_file(swapper_of(engine).swap_folder).read_bytes()
    result = {"losses": losses + train(engine, BEFORE - 1, first=1)}
    engine.save_checkpoint(checkpoints, tag="good")
    result["saved"] = held_everywhere(engine)
    result["read"] = read_damaged(engine, stale)
    if RANK == 1:
        (other,) = Path(folder, "swap").glob("**/optimizer/rank0")
        result["in use"] = error_of(swap_file.lock, str(other))
    result["load"] = load_damaged(engine, checkpoints)
    result["newer"] = give_newer(engine)
    result["after trouble"] = held_everywhere(engine)
    result["used"] = use(engine)
    # More weight corrections than weights' bytes: 1.5 MB are enough for files of weights only.
    ds_config = nvme_config(f"{folder}/more", dtype=BF16_MASTERS, weight_correction_bits=8)
    with file_size_limit(1_500_000 if RANK == 1 else resource.RLIM_INFINITY):
        result["full disk"] = error_of(make_tower, ds_config)
    in_memory = make_tower(nvme_config(None))
    train(in_memory, BEFORE)
    result["used in memory"] = use(in_memory)
    if RANK == 1:
        cut(first_state_file(swapper_of(engine).swap_folder))
    result["step"] = error_of(train, engine, 1)
    return result


def meet_a_damaged_file_of_muon(folder, number):
    """Take a step of which one rank cannot read a sub-group, between exchanges of matrices."""
    engine = make_tower(nvme_config(f"{folder}/swap", pipelined=number == 1, **MUON))
    train(engine, 1)
    files = sorted(Path(swapper_of(engine).swap_folder).glob("zero8-*"))
    if RANK == 1:
        cut(files[number])
    return {"files": len(files), "step": error_of(train, engine, 1)}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "pipelined"])
def met(request, tmp_path_factory):
    """Not in standing ranks: no one knows what is left of processes that have met all this."""
    need_nvme()
    folder = tmp_path_factory.mktemp("trouble")
    kwargs = {"folder": str(folder), "pipelined": request.param}
    return run_ranks(meet_everything, 2, folder, timeout_s=900, **kwargs)


MESSAGES = dict.fromkeys(DAMAGES, "") | {
    "stale": "it is whole, but of step 1 and not what this run wrote",
    "of another sub-group": "it is whole, but of step 2 and not what this run wrote",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_zero3_nvme_state_file_that_is_not_what_was_written_is_an_error_that_names_it(met, name):
    for rank in met:
        path, errors = rank["read"]
        kind, message = errors[name]
        assert kind == ("FileNotFoundError" if name == "gone" else "ValueError")
        assert path in message and MESSAGES[name] in message


@pytest.mark.parametrize("name", [*(f"state {name}" for name in DAMAGES), "weights cut"])
def test_zero3_nvme_checkpoint_damaged_on_one_rank_is_an_error_on_both(met, name):
    kind, message = met[1]["load"][name]
    assert kind == ("FileNotFoundError" if name == "state gone" else "ValueError")
    assert "offloaded_tensors" in message and ".tensor.swp" in message
    kind, message = met[0]["load"][name]
    assert kind == "OSError"
    assert message.startswith("1 other rank(s) could not load the checkpoint")


def test_zero3_nvme_load_of_a_part_is_refused(met):
    for rank in met:
        for asked in ("{'load_module_only': True}", "{'load_optimizer_states': False}"):
            kind, message = rank["load"][asked]
            assert kind == "ValueError" and "can only load all" in message


def test_zero3_nvme_state_loaded_by_hand_is_newer_than_its_file(met):
    for rank in met:
        assert rank["newer"] == [BEFORE, BEFORE + 100]


def test_zero3_nvme_trouble_changes_nothing(met):
    assert "give each job an nvme_path of its own" in met[1]["in use"][1]
    for rank in met:
        assert difference(rank["saved"], rank["after trouble"]) == ""


def test_zero3_nvme_step_that_one_rank_cannot_take_is_an_error_on_both(met):
    """Rank 0 has nothing to complain of, and would wait for weights that rank 1 does not send."""
    first, second = (rank["step"] for rank in met)
    assert first[0] == "OSError"
    assert first[1].startswith("1 other rank(s) could not swap its optimizer states during a step")
    assert second[0] == "ValueError" and "rank1/zero8-" in second[1] and "cut short" in second[1]


@pytest.mark.parametrize("number", range(3))
def test_zero3_nvme_step_of_muon_that_one_rank_cannot_take_is_an_error_on_both(tmp_path, number):
    """Ranks that exchange matrices wait for each other within the step, too.

    Two sub-groups are Muon's, the last is AdamW's, which exchanges nothing.
    """
    need_nvme()
    first, second = run_ranks(
        meet_a_damaged_file_of_muon, 2, tmp_path, timeout_s=300, folder=str(tmp_path), number=number
    )
    assert first["files"] == second["files"] == 3
    kind, message = first["step"]
    assert kind == "OSError"
    assert message.startswith("1 other rank(s) could not swap its optimizer states during a step")
    kind, message = second["step"]
    assert kind == "ValueError" and "zero8-" in message


def test_zero3_nvme_full_disk_is_an_error_at_the_start_on_all_ranks(met):
    first, second = (rank["full disk"] for rank in met)
    assert first[0] == second[0] == "OSError"
    assert first[1].startswith("1 other rank(s) could not take the disk space")
    assert "/rank1/zero8-" in second[1] and "bytes are free" in second[1]


def test_zero3_nvme_access_to_moments_equals_that_in_memory(met):
    for rank in met:
        used, in_memory = rank["used"], rank["used in memory"] | {"local": rank["used"]["local"]}
        assert difference(used, in_memory) == ""
        assert difference(used["set"], used["full"]) != ""


def test_zero3_nvme_moment_that_was_set_is_in_its_file_and_one_that_was_read_stays(met):
    """A save may follow, which copies the file.  Other sub-groups use the buffer of what was read;
    without a disk it is live."""
    for rank in met:
        assert rank["used"]["under way"] == []
        assert difference(*rank["used"]["local"]) == ""
        assert rank["used"]["local"][0].abs().max() > 0


# --- Fresh processes over what the first ones left -----------------------------------------------


def load_into(folder, options):
    """Load into an optimizer with other settings, and train on."""
    engine = make_tower(nvme_config(f"{folder}/swap", **options), TowerWithAMatrix)
    with warned() as lines:
        engine.load_checkpoint(f"{folder}/checkpoints", tag="good")
        loaded = held_everywhere(engine)
        losses = train(engine, AFTER, first=BEFORE)
    return {"loaded": loaded, "losses": losses, "lines": lines}


def save(folder):
    engine = make_tower(nvme_config(f"{folder}/swap"), TowerWithAMatrix)
    train(engine, BEFORE)
    engine.save_checkpoint(f"{folder}/checkpoints", tag="good")
    return held_everywhere(engine)


OTHER = {"codec": "dynamic", "block_size": 128}


def test_zero3_nvme_load_with_another_codec_encodes_anew_and_says_so_on_rank_0(tmp_path):
    """In fresh processes: a checkpoint of swapped states loads in no others."""
    need_nvme()
    kwargs = {"timeout_s": 900, "folder": str(tmp_path)}
    before = run_ranks(save, 2, tmp_path, **kwargs)
    after = run_ranks(load_into, 2, tmp_path, options=OTHER, **kwargs)
    for number, (saved, other) in enumerate(zip(before, after, strict=True)):
        for ours, theirs in zip(other["loaded"]["states"], saved["states"], strict=True):
            assert ours["step"] == theirs["step"] == BEFORE
            tables = [PieceTable(state["pieces"], len(state["master"])) for state in (ours, theirs)]
            for which in MOMENTS:
                source = MomentStore(
                    codec_named("log"), ADAM.moment(which), tables[1], *theirs[which]
                )
                target = MomentStore.zeros(
                    codec_named(OTHER["codec"]), ADAM.moment(which), tables[0]
                )
                target.write(0, source.read(0, tables[1].numel))
                expected = target.codes, target.scales, target.dense
                assert difference(ours[which], expected) == ""
        assert len(set(other["losses"])) == AFTER
        assert any("were saved with" in line for line in other["lines"]) == (number == 0)
