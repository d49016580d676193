# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine on two ranks: complete and verified, or an error on both."""

import os
import resource
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from deepspeed.utils import groups
from full_disk import file_size_limit
from log_lines import warned
from moment_samples import flipped_in
from needs import need_nvme
from nests import difference
from nvme_worker import make_tower, nvme_config
from ranks import error_of, run_ranks
from zero_worker import base_optimizer, config, held, make_engine, train

from zero8.deepspeed import save as checkpoint_save
from zero8.files import tags
from zero8.files.manifest import MANIFEST, MARKER
from zero8.files.tags import locked, seal, verify

RANK = int(os.environ.get("RANK", 0))
RANK_1 = "*pp_rank_1_*optim*"


def together(function, *args):
    """Call a function on rank 0 while the other waits."""
    if RANK == 0:
        function(*args)
    torch.distributed.barrier()


def flip(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_a_code(path):
    """Flip a bit of a code of v in a file of ZeRO-2's states."""
    zero = torch.load(path, weights_only=False)["optimizer_state_dict"]
    (state,) = zero["base_optimizer_state"]["state"].values()
    path.write_bytes(flipped_in(path.read_bytes(), state["exp_avg_sq"]["codes"]))


def cut(path):
    os.truncate(path, path.stat().st_size - 7)


def names(text):
    return lambda path: path.write_bytes(text)


def one_too_many(path):
    shutil.copyfile(path, path.with_name("mp_rank_07_model_states.pt"))


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
LAYOUTS = {"zero2 offload": config(), "zero3 offload, bf16": config(stage=3, dtype={})}
NAMES = ["zero2 offload", pytest.param("zero3 offload, bf16", marks=pytest.mark.slow)]


def meet_damages(ds_config, folder, names):
    """Save twice, train on; load what is damaged in one way after another, and what is whole."""
    engine, errors, whole = make_engine(ds_config), {}, f"{folder} whole"
    for step, tag in enumerate(("old", "new")):
        train(engine, 1, first=step)
        engine.save_checkpoint(folder, tag=tag)
    saved = held(engine)
    train(engine, 1, first=2)
    before = held(engine)
    together(shutil.copytree, folder, whole)
    for name in names:
        pattern, damage, _ = DAMAGES[name]
        together(lambda p=pattern, d=damage: d(min(Path(folder).glob(p))))
        errors[name] = error_of(engine.load_checkpoint, folder)
        torch.distributed.barrier()
        together(lambda: (shutil.rmtree(folder), shutil.copytree(whole, folder)))
    changed = difference(before, held(engine))
    engine.load_checkpoint(folder)
    return {"errors": errors, "changed": changed, "loaded": difference(saved, held(engine))}


@pytest.fixture(scope="module")
def damaged(standing_ranks, tmp_path_factory):
    """Return a function: of a layout, what each rank met."""

    @cache
    def of(name):
        folder = tmp_path_factory.mktemp("integrity") / "checkpoints"
        kwargs = {"ds_config": LAYOUTS[name], "folder": str(folder), "names": list(DAMAGES)}
        return standing_ranks(2).run(meet_damages, timeout_s=240, **kwargs), folder

    return of


@pytest.mark.parametrize("name", NAMES)
def test_load_of_a_damaged_checkpoint_is_an_error_on_both_ranks_and_changes_nothing(damaged, name):
    ranks, _ = damaged(name)
    assert ranks[0]["errors"] == ranks[1]["errors"]
    for what, (kind, message) in ranks[0]["errors"].items():
        assert DAMAGES[what][2] in message and "Nothing has been loaded" in message, message
        assert kind == ("FileNotFoundError" if what == "latest, of nothing" else "ValueError")
    for rank in ranks:
        assert (rank["changed"], rank["loaded"]) == ("", "")


@pytest.mark.parametrize("name", NAMES)
def test_save_leaves_a_complete_tag_with_every_file_and_its_writer(damaged, name):
    _, folder = damaged(name)
    manifest = verify(folder / "new")
    assert manifest.world_size == 2 and {file.rank for file in manifest.files} == {0, 1}
    there = {path.name for path in (folder / "new").iterdir()} - {MANIFEST}
    assert {file.path for file in manifest.files} == there
    assert [tag.name for tag in tags.complete_tags(folder)] == ["old", "new"]
    assert tags.read_latest(folder) == "new"


# --- Which tag is loaded -------------------------------------------------------------------------

# What is asked for: the steps of what is loaded, or what the error says; what the log of rank 0
# says, and that of rank 1 does not.
CHOICES = {
    "latest": (2, ""),
    "explicit": (3, ""),
    "no latest": (3, "has no file 'latest'; loading the newest complete, third"),
    "explicit torn": ("torn is incomplete: saving it was interrupted", ""),
    "damaged, not allowed": ("complete tags: first, second. To load the previous one", ""),
    "damaged, allowed": (2, "checkpoints/second instead"),
    "damaged, explicit": ("third is damaged", ""),
    "two damaged, allowed": (1, "checkpoints/first instead"),
    "torn, allowed": (1, "checkpoints/first instead"),
    "all damaged, allowed": ("torn is incomplete", ""),
}


def damage(folder, tag, pattern=RANK_1):
    together(lambda: flip(min(Path(folder, tag).glob(pattern))))


def load_by_tag(folder):
    """Return for each of CHOICES: the error, what was logged, steps taken."""
    allowed = {"zero8": {"load_previous_if_damaged": True}}
    strict, allowing = (make_engine(config() | section) for section in ({}, allowed))
    found = {}

    def load(name, engine, **kwargs):
        with warned() as lines:
            error = error_of(engine.load_checkpoint, folder, **kwargs)
        found[name] = {"error": error, "log": "\n".join(lines), "steps": engine.global_steps}
        torch.distributed.barrier()

    for step, tag in enumerate(("first", "second", "third")):
        train(strict, 1, first=step)
        strict.save_checkpoint(folder, tag=tag, save_latest=tag != "third")
    load("latest", strict)
    load("explicit", strict, tag="third")
    together(os.remove, f"{folder}/latest")
    load("no latest", strict)
    together(tags.write_latest, Path(folder), "third")
    together(lambda: tags.begin(Path(folder, "torn"), 9, is_part=lambda path: False))
    load("explicit torn", allowing, tag="torn")
    damage(folder, "third")
    load("damaged, not allowed", strict)
    load("damaged, allowed", allowing)
    load("damaged, explicit", allowing, tag="third")
    damage(folder, "second", MANIFEST)
    load("two damaged, allowed", allowing)
    together(tags.write_latest, Path(folder), "torn")
    load("torn, allowed", allowing)
    damage(folder, "first")
    load("all damaged, allowed", allowing)
    return found


@pytest.fixture(scope="module")
def by_tag(standing_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags") / "checkpoints"
    return standing_ranks(2).run(load_by_tag, timeout_s=240, folder=str(folder))


@pytest.mark.parametrize("name", CHOICES)
def test_load_takes_the_tag_that_is_asked_for_or_one_before_only_if_allowed(by_tag, name):
    expected, log = CHOICES[name]
    first, second = (rank[name] for rank in by_tag)
    assert first["error"] == second["error"] and first["steps"] == second["steps"]
    if isinstance(expected, int):
        assert (first["error"], first["steps"]) == (None, expected)
    else:
        assert expected in first["error"][1]
    assert log in first["log"] and not (log and second["log"])


# --- Other ways to save and load -----------------------------------------------------------------


def save_and_load_otherwise(folder):
    """Return what comes of tags without a manifest, of errors of one rank, of other optimizers."""
    found = {}
    engine = make_engine(config() | {"zero8": {"keep_checkpoints": 2}})
    train(engine, 1)
    for tag in "abcd":
        engine.save_checkpoint(f"{folder}/kept", tag=tag)
    torch.distributed.barrier()
    found["kept"] = sorted(path.name for path in Path(folder, "kept").iterdir() if path.is_dir())
    engine = make_engine(config())

    def load(name, tag=None):
        found[name] = error_of(engine.load_checkpoint, folder, tag=tag)
        torch.distributed.barrier()

    def save(name, engine=engine, **options):
        found[name] = error_of(engine.save_checkpoint, folder, **options)
        torch.distributed.barrier()

    train(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    for rank in range(2):
        refuse = patch.object(
            base_optimizer(engine), "load_state_dict", side_effect=ValueError("bad")
        )
        with refuse if RANK == rank else nullcontext():
            load(f"refused by rank {rank}")
    together(os.remove, f"{folder}/one/{MANIFEST}")
    with warned() as lines:
        load("no manifest")
    found["no manifest, log"] = "\n".join(lines)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="two", save_latest=False)
    together(os.remove, f"{folder}/two/{MANIFEST}")
    states, *_ = Path(folder, "one").glob(RANK_1)
    together(shutil.copyfile, states, Path(folder, "two", states.name))
    load("mixed", "two")
    together(flip_a_code, Path(folder, "two", states.name))
    load("no manifest, flipped", "two")
    engine = make_engine(config())
    together(cut, states)
    load("no manifest, cut")
    together(shutil.copytree, f"{folder}/kept/d", f"{folder}/sealed")
    together(os.remove, f"{folder}/sealed/{MANIFEST}")
    together(seal, Path(folder, "sealed"))
    load("sealed", "sealed")
    save("again", engine, tag="one")
    load("again, loaded")
    # A job of its own holds the lock.
    with locked(Path(folder)) if RANK == 0 else nullcontext():
        torch.distributed.barrier()
        save("locked", engine, tag="other")
    save("unpicklable", engine, tag="x", client_state={"f": lambda: None})
    load("after errors")
    with warned() as lines:
        save("own tags", engine, tag=f"own{RANK}", save_latest=False)
    found["own tags, log"] = "\n".join(lines)
    unseen = patch.object(tags, "note_of", return_value=None) if RANK == 1 else nullcontext()
    with patch.object(checkpoint_save, "VISIBLE_WITHIN_S", 0.1), unseen, warned() as lines:
        save("not shared", engine, tag="unseen")
    found["not shared, log"] = "\n".join(lines)
    load("not shared, loaded")
    meshed = make_engine(config(stage=3), mesh_param=(1, 2))
    groups.mesh_device = None  # DeepSpeed does not forget it
    train(meshed, 1)
    save("same files", meshed, tag="meshed")
    load("after the same files")
    for name, ds_config in {
        "local": config() | {"checkpoint": {"use_node_local_storage": True}},
        "adamw": config(optimizer="AdamW"),
    }.items():
        other = make_engine(ds_config)
        train(other, 1)
        other.save_checkpoint(f"{folder}/{name}", tag="one")
    found["adamw"] = error_of(other.load_checkpoint, f"{folder}/adamw")
    return found


@pytest.fixture(scope="module")
def otherwise(standing_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("otherwise") / "checkpoints"
    return standing_ranks(2).run(save_and_load_otherwise, timeout_s=240, folder=str(folder)), folder


ERRORS = {
    "refused by rank 0": (("ValueError", "bad"), ("ValueError", "rank 0: ValueError: bad")),
    "refused by rank 1": (("ValueError", "rank 1: ValueError: bad"), ("ValueError", "bad")),
    "mixed": (("ValueError", "different steps, rank by rank [3, 1]"),) * 2,
    "no manifest, flipped": (
        ("ValueError", "rank 1: ValueError: 8-bit moment exp_avg_sq of "),
        ("ValueError", "8-bit moment exp_avg_sq of "),
    ),
    "no manifest, cut": (("OSError", "rank 1: "), ("RuntimeError", "")),
    "locked": (("OSError", "another job saves into this folder, or prunes it: process"),) * 2,
    "unpicklable": (("OSError", "x is incomplete: rank 0: "),) * 2,
    "same files": (("ValueError", "parallel_state_sp"),) * 2,
}
"""What each rank raises."""
FINE = (
    "no manifest",
    "sealed",
    "again",
    "again, loaded",
    "after errors",
    "own tags",
    "not shared",
    "not shared, loaded",
    "after the same files",
    "adamw",
)
LOGGED = {
    "no manifest": "checkpoints/one is not verified",
    "own tags": "without a manifest: ranks save different tags",
    "not shared": "not all ranks see the files of rank 0",
}


@pytest.mark.parametrize("what", ERRORS)
def test_trouble_of_one_rank_is_an_error_on_both(what, otherwise):
    """One rank's refusal, a tag without a manifest, another job, what cannot be pickled."""
    for rank, (kind, text) in zip(otherwise[0], ERRORS[what], strict=True):
        assert rank[what][0] == kind and text in rank[what][1], rank[what]


def test_checkpoint_that_is_not_covered_works_as_deepspeeds_and_says_so(otherwise):
    """So do those after errors; other optimizers and local disks leave DeepSpeed's files only."""
    ranks, folder = otherwise
    for rank in ranks:
        assert {what: rank[what] for what in FINE} == dict.fromkeys(FINE)
        assert rank["kept"] == ["c", "d"]
    for what, line in LOGGED.items():
        assert line in ranks[0][f"{what}, log"], what
    for tag in ("own0", "unseen", "local/one", "adamw/one"):
        assert not {MANIFEST, MARKER} & {path.name for path in (folder / tag).iterdir()}, tag
    assert tags.tag_at(folder / "meshed").state == tags.INCOMPLETE


def resume_alone(folder):
    """Load what two ranks saved, and of that the weights of the module alone."""
    engine = make_engine(config())
    error = error_of(engine.load_checkpoint, folder, tag="one")
    return error, error_of(engine.load_checkpoint, folder, tag="one", load_module_only=True)


@pytest.mark.slow
def test_load_by_another_number_of_ranks_says_what_to_do(otherwise, standing_ranks):
    ((error, of_module),) = standing_ranks(1).run(resume_alone, folder=str(otherwise[1]))
    assert (error[0], of_module) == ("ValueError", None)
    assert "was saved by 2 rank(s), this run has 1" in error[1] and "--to zero" in error[1]


# --- States on a disk ----------------------------------------------------------------------------


def save_swapped(folder):
    """Save twice under the same tag; return what loads say of each kind of file that is damaged."""
    engine = make_tower(nvme_config(f"{folder}/swap"))
    train(engine, 1)
    for _ in range(2):
        engine.save_checkpoint(f"{folder}/checkpoints", tag="new")
    errors, files = {}, Path(folder, "checkpoints", "new", "offloaded_tensors")
    for pattern, harm in SWAPPED.items():
        path = min(files.glob(pattern))
        data = path.read_bytes()
        together(harm, path)
        errors[pattern] = error_of(engine.load_checkpoint, f"{folder}/checkpoints")
        torch.distributed.barrier()
        together(path.write_bytes, data)
    with file_size_limit(500_000 if RANK == 1 else resource.RLIM_INFINITY):
        full = error_of(engine.save_checkpoint, f"{folder}/checkpoints", tag="full")
    return errors, full


SWAPPED = {"rank*0/zero8-*": flip, "rank*1/[0-9]*": flip, "rank*1/zero8-*": cut}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_checkpoint_of_swapped_states_is_verified_in_every_file(tmp_path):
    need_nvme()
    ranks = run_ranks(save_swapped, 2, tmp_path, timeout_s=600, folder=str(tmp_path))
    assert ranks[0][0] == ranks[1][0]
    for errors, (kind_of_full, full) in ranks:
        for pattern, (kind, message) in errors.items():
            assert kind == "ValueError" and "offloaded_tensors/rank" in message, message
            assert f"(written by rank {pattern[len('rank*')]})" in message
        assert kind_of_full == "OSError" and "rank 1: " in full
        assert "offloaded_tensors/rank01/" in full and "File too large" in full
