# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine on two ranks: complete and verified, or an error on both."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from damages import cut, flip
from deepspeed.utils import groups
from log_lines import warned
from nests import assert_same
from ranks import error_of, on_ranks
from zero_worker import base_optimizer, config, held, make_engine, together, train

from zero8.deepspeed import save as checkpoint_save
from zero8.environment.ranks import gathered
from zero8.files import tags
from zero8.files.manifest import MANIFEST, MARKER
from zero8.files.tags import locked, seal, verify

RANK = int(os.environ.get("RANK", 0))
RANK_1 = "*pp_rank_1_*optim*"


def names(text):
    return lambda path: path.write_bytes(text)


def one_too_many(path):
    shutil.copyfile(path, path.with_name("mp_rank_07_model_states.pt"))


def alike(error):
    """Return an error, which must be the same on both ranks."""
    first, second = gathered(error)
    assert first == second, (first, second)
    return error


# --- What is damaged -----------------------------------------------------------------------------

# The file, what happens to it, and what the error says.
MODEL, OTHER = "new/*model_states.pt", f"new/{RANK_1}"
BY_RANK_1 = "optim_states.pt (written by rank 1)"
DAMAGES = {
    "model, flipped": (MODEL, flip, "model_states.pt (written by rank 0): contents differ"),
    "rank 1, flipped": (OTHER, flip, f"{BY_RANK_1}: contents differ"),
    "rank 1, missing": (OTHER, os.remove, f"{BY_RANK_1}: missing"),
    "manifest, flipped": (f"new/{MANIFEST}", flip, "zero8_manifest.json"),
    "latest, garbage": ("latest", names(b"\xff\0new"), "checkpoints/latest"),
    "latest, of nothing": ("latest", names(b"none"), "there is no such checkpoint"),
    "a file too many": (MODEL, one_too_many, "mp_rank_07_model_states.pt: not in the manifest"),
}
CONFIGS = [
    pytest.param(config(), id="zero2 offload"),
    pytest.param(config(stage=3, dtype={}), id="zero3 offload, bf16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("ds_config", CONFIGS)
@on_ranks(2, timeout_s=240)
def test_load_of_a_damaged_checkpoint_is_an_error_on_both_ranks_and_changes_nothing(
    ds_config, tmp_path
):
    folder, whole = tmp_path / "checkpoints", tmp_path / "whole"
    engine = make_engine(ds_config)
    for step, tag in enumerate(("old", "new")):
        train(engine, 1, first=step)
        engine.save_checkpoint(folder, tag=tag)
    saved = held(engine)
    train(engine, 1, first=2)
    before = held(engine)
    together(shutil.copytree, folder, whole)
    for what, (pattern, damage, message) in DAMAGES.items():
        together(lambda p=pattern, d=damage: d(min(folder.glob(p))))
        kind, text = alike(error_of(engine.load_checkpoint, folder))
        assert message in text and "Nothing has been loaded" in text, text
        assert kind == ("FileNotFoundError" if what == "latest, of nothing" else "ValueError")
        together(lambda: (shutil.rmtree(folder), shutil.copytree(whole, folder)))
    assert_same(held(engine), before)
    engine.load_checkpoint(folder)
    assert_same(held(engine), saved)
    # What was saved is complete, and names every file and its writer.
    manifest = verify(folder / "new")
    assert manifest.world_size == 2 and {file.rank for file in manifest.files} == {0, 1}
    there = {path.name for path in (folder / "new").iterdir()} - {MANIFEST}
    assert {file.path for file in manifest.files} == there
    assert [tag.name for tag in tags.complete_tags(folder)] == ["old", "new"]
    assert tags.read_latest(folder) == "new"


# --- Which tag is loaded -------------------------------------------------------------------------


def damage(folder, tag, pattern=RANK_1):
    together(lambda: flip(min(Path(folder, tag).glob(pattern))))


@on_ranks(2, timeout_s=240)
def test_load_takes_the_tag_that_is_asked_for_or_one_before_only_if_allowed(tmp_path):
    folder = tmp_path
    allowed = {"zero8": {"load_previous_if_damaged": True}}
    strict, allowing = (make_engine(config() | section) for section in ({}, allowed))

    def load(engine, expected, log="", **kwargs):
        """Load; `expected` are the steps of what is loaded, or what the error says.

        `log` is in the log of rank 0, and not in that of rank 1.
        """
        with warned() as lines:
            error = alike(error_of(engine.load_checkpoint, folder, **kwargs))
        if isinstance(expected, int):
            assert (error, engine.global_steps) == (None, expected)
        else:
            assert expected in error[1], error
        assert not log or (log in "\n".join(lines)) == (RANK == 0), lines
        torch.distributed.barrier()

    for step, tag in enumerate(("first", "second", "third")):
        train(strict, 1, first=step)
        strict.save_checkpoint(folder, tag=tag, save_latest=tag != "third")
    load(strict, 2)
    load(strict, 3, tag="third")
    together(os.remove, f"{folder}/latest")
    load(strict, 3, "has no file 'latest'; loading the newest complete, third")
    together(tags.write_latest, folder, "third")
    together(lambda: tags.begin(Path(folder, "torn"), 9, is_part=lambda path: False))
    load(allowing, "torn is incomplete: saving it was interrupted", tag="torn")
    load(allowing, "there is no such checkpoint", tag="none")
    damage(folder, "third")
    load(strict, "complete tags: first, second. To load the previous one")
    load(allowing, 2, f"{folder.name}/second instead")
    load(allowing, "third is damaged", tag="third")
    damage(folder, "second", MANIFEST)
    load(allowing, 1, f"{folder.name}/first instead")
    together(tags.write_latest, folder, "torn")
    load(allowing, 1, f"{folder.name}/first instead")
    damage(folder, "first")
    load(allowing, "torn is incomplete")


# --- Other ways to save and load -----------------------------------------------------------------


@on_ranks(2, timeout_s=240)
def test_trouble_of_one_rank_is_an_error_on_both_and_what_is_not_covered_says_so(tmp_path):
    """One rank's refusal, tags without a manifest, another job, what cannot be pickled."""
    folder = tmp_path
    engine = make_engine(config() | {"zero8": {"keep_checkpoints": 2}})
    train(engine, 1)
    for tag in "abcd":
        engine.save_checkpoint(folder / "kept", tag=tag)
    torch.distributed.barrier()
    assert sorted(path.name for path in (folder / "kept").glob("*/")) == ["c", "d"]
    engine = make_engine(config())

    def check(error, *expected):
        """Check an error of one kind and text on both ranks, or of two; none if it is fine."""
        torch.distributed.barrier()
        if not expected:
            assert error is None, error
            return
        kind, text = expected[RANK % len(expected)]
        assert error and error[0] == kind and text in error[1], error

    def load(*expected, tag=None):
        check(error_of(engine.load_checkpoint, folder, tag=tag), *expected)

    def save(*expected, engine=engine, **options):
        check(error_of(engine.save_checkpoint, folder, **options), *expected)

    def assert_without_manifest(tag):
        assert not {MANIFEST, MARKER} & {path.name for path in (folder / tag).iterdir()}, tag

    train(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    for rank in range(2):
        refuse = patch.object(
            base_optimizer(engine), "load_state_dict", side_effect=ValueError("bad")
        )
        told = [("ValueError", f"rank {rank}: ValueError: bad")] * 2
        told[rank] = "ValueError", "bad"
        with refuse if RANK == rank else nullcontext():
            load(*told)
    together(os.remove, folder / "one" / MANIFEST)
    with warned() as lines:
        load()
    assert RANK or any("one is not verified" in line for line in lines)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="two", save_latest=False)
    together(os.remove, folder / "two" / MANIFEST)
    states, *_ = (folder / "one").glob(RANK_1)
    together(shutil.copyfile, states, folder / "two" / states.name)
    load(("ValueError", "different steps, rank by rank [3, 1]"), tag="two")
    engine = make_engine(config())
    together(cut, states)
    load(("OSError", "rank 1: "), ("RuntimeError", ""))
    together(shutil.copytree, folder / "kept" / "d", folder / "sealed")
    together(os.remove, folder / "sealed" / MANIFEST)
    together(seal, folder / "sealed")
    load(tag="sealed")
    damage(folder, "sealed")
    load(("ValueError", "contents differ"), tag="sealed")
    save(engine=engine, tag="one")
    load()
    # A job of its own holds the lock.
    with locked(folder) if RANK == 0 else nullcontext():
        torch.distributed.barrier()
        told = "OSError", "another job saves into this folder, or prunes it: process"
        save(told, engine=engine, tag="other")
    told = "OSError", "x is incomplete: rank 0: "
    save(told, engine=engine, tag="x", client_state={"f": lambda: None})
    load()
    with warned() as lines:
        save(engine=engine, tag=f"own{RANK}", save_latest=False)
    assert RANK or any("manifest: ranks save different tags" in line for line in lines)
    assert_without_manifest("own0")
    unseen = patch.object(tags, "note_of", return_value=None) if RANK == 1 else nullcontext()
    with patch.object(checkpoint_save, "VISIBLE_WITHIN_S", 0.1), unseen, warned() as lines:
        save(engine=engine, tag="unseen")
    assert RANK or any("not all ranks see the files of rank 0" in line for line in lines)
    assert_without_manifest("unseen")
    load()
    meshed = make_engine(config(stage=3), mesh_param=(1, 2))
    groups.mesh_device = None  # DeepSpeed does not forget it
    train(meshed, 1)
    save(("ValueError", "parallel_state_sp"), engine=meshed, tag="meshed")
    assert tags.tag_at(folder / "meshed").state == tags.INCOMPLETE
    load()


@on_ranks(2)
def test_checkpoint_of_other_optimizers_and_on_local_disks_has_deepspeeds_files_only(tmp_path):
    on_local_disks = config() | {"checkpoint": {"use_node_local_storage": True}}
    for tag, ds_config in {"local": on_local_disks, "adamw": config(optimizer="AdamW")}.items():
        engine = make_engine(ds_config)
        train(engine, 1)
        engine.save_checkpoint(tmp_path, tag=tag)
        assert not {MANIFEST, MARKER} & {path.name for path in (tmp_path / tag).iterdir()}
    engine.load_checkpoint(tmp_path)


@on_ranks(2)
def save_as_two(folder):
    engine = make_engine(config())
    train(engine, 1)
    engine.save_checkpoint(folder, tag="one")


@on_ranks(1)
def resume_alone(folder):
    """Load what two ranks saved, and of that the weights of the module alone."""
    engine = make_engine(config())
    kind, message = error_of(engine.load_checkpoint, folder, tag="one")
    assert kind == "ValueError" and "was saved by 2 rank(s), this run has 1" in message
    assert "--to zero" in message
    engine.load_checkpoint(folder, tag="one", load_module_only=True)


@pytest.mark.slow
def test_load_by_another_number_of_ranks_says_what_to_do(standing_ranks, tmp_path):
    save_as_two(standing_ranks, folder=tmp_path)
    resume_alone(standing_ranks, folder=tmp_path)
