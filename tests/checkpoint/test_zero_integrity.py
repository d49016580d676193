# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine on two ranks: complete and verified, or an error on both."""

import logging
import os
import re
import resource
import shutil
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from deepspeed.checkpoint.constants import CHECKPOINT_PARALLEL_DIMS
from deepspeed.utils import groups
from moment_samples import flipped_in
from needs import need_nvme
from nests import difference
from nvme_worker import held_everywhere, make_tower, nvme_config
from ranks import error_of, run_ranks
from zero_worker import base_optimizer, config, held, make_engine, train

from zero8.deepspeed import load as checkpoint_load
from zero8.deepspeed import save as checkpoint_save
from zero8.files import tags
from zero8.files.manifest import MANIFEST, MARKER
from zero8.files.tags import locked, seal, verify

RANK = int(os.environ.get("RANK", 0))


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


def from_other_rank(path):
    """Replace a file by that of another rank."""
    shutil.copyfile(path.with_name(path.name.replace("pp_rank_1", "pp_rank_0")), path)


def from_other_tag(path):
    """Replace a file of the tag "new" by that of "old"."""
    shutil.copyfile(path.parent.parent / "old" / path.name, path)


KINDS = {
    "model": "new/*model_states.pt",
    "rank 0": "new/*pp_rank_0_*optim*",
    "rank 1": "new/*pp_rank_1_*optim*",
}
DAMAGES = {
    f"{kind}, {name}": (pattern, damage)
    for kind, pattern in KINDS.items()
    for name, damage in {
        "flipped": flip,
        "cut": cut,
        "missing": os.remove,
        "of another tag": from_other_tag,
    }.items()
}
DAMAGES |= {
    "rank 1, of another rank": (KINDS["rank 1"], from_other_rank),
    "manifest, flipped": (f"new/{MANIFEST}", flip),
    "manifest, cut": (f"new/{MANIFEST}", cut),
    "latest, garbage": ("latest", lambda path: path.write_bytes(b"\xff\0new")),
    "latest, empty": ("latest", lambda path: path.write_bytes(b"")),
    "latest, of nothing": ("latest", lambda path: path.write_bytes(b"none")),
    "a file too many": (
        KINDS["model"],
        lambda path: shutil.copyfile(path, path.with_name("mp_rank_07_model_states.pt")),
    ),
}


def together(function, *args):
    """Call a function on rank 0 while the other waits."""
    if RANK == 0:
        function(*args)
    torch.distributed.barrier()


def damage_and_load(engine, folder, damages):
    """Return what loading raises, by damage, and what that changed; all is whole afterwards."""
    errors, whole, before = {}, f"{folder} whole", held(engine)
    together(shutil.copytree, folder, whole)
    for name, (pattern, damage) in damages.items():
        together(lambda p=pattern, d=damage: d(min(Path(folder).glob(p))))
        errors[name] = error_of(engine.load_checkpoint, folder)
        torch.distributed.barrier()
        together(lambda: (shutil.rmtree(folder), shutil.copytree(whole, folder)))
    return errors, difference(before, held(engine))


def save_twice(engine, folder):
    """Train and save "old", train and save "new"; return what was saved as "new"."""
    train(engine, 1)
    engine.save_checkpoint(folder, tag="old")
    train(engine, 1, first=1)
    engine.save_checkpoint(folder, tag="new")
    return held(engine)


def meet_damages(ds_config, folder, names):
    """Save, train on, load what is damaged, and then what is whole."""
    engine = make_engine(ds_config)
    saved = save_twice(engine, folder)
    train(engine, 1, first=2)
    errors, changed = damage_and_load(engine, folder, {name: DAMAGES[name] for name in names})
    path, _ = engine.load_checkpoint(folder)
    loaded = difference(saved, held(engine))
    losses = train(engine, 1, first=2)
    engine.destroy()
    return {"errors": errors, "changed": changed, "loaded": loaded, "path": path, "losses": losses}


LAYOUTS = {
    "zero1": config(stage=1, offload=None),
    "zero2 offload": config(stage=2),
    "zero3": config(stage=3, offload=None),
    "zero3 offload, bf16": config(stage=3, dtype={}),
}
QUICK = ("zero2 offload",)
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in LAYOUTS
]


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
    for rank in ranks:
        assert [what for what in DAMAGES if rank["errors"][what] is None] == []
        assert rank["changed"] == ""
        # Once the files are whole again.
        assert rank["path"] is not None and rank["loaded"] == ""
    assert ranks[0]["errors"] == ranks[1]["errors"]


@pytest.mark.parametrize("name", NAMES)
def test_load_of_a_damaged_checkpoint_names_file_writer_and_reason(damaged, name):
    errors = damaged(name)[0][0]["errors"]
    reasons = {"flipped": "contents differ", "cut": "truncated: got", "missing": "missing"}
    for what, (kind, message) in errors.items():
        part, _, damage = what.partition(", ")
        if part in KINDS:
            assert kind == "ValueError"
            assert "states.pt (written by rank" in message and "Nothing has been loaded" in message
            assert reasons.get(damage, "") in message, what
        if part.startswith("rank"):
            assert f"optim_states.pt (written by {part})" in message
    assert "zero8_manifest.json" in errors["manifest, flipped"][1]
    assert "checkpoints/latest" in errors["latest, garbage"][1]
    assert "mp_rank_07_model_states.pt: not in the manifest" in errors["a file too many"][1]
    assert errors["latest, of nothing"][0] == "FileNotFoundError"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.shown("docs/checkpoints.md", "runs/7b/global_step800 is damaged")
def test_load_of_a_damaged_checkpoint_is_the_error_that_readme_shows(block, damaged, name):
    """But for names and numbers."""
    expected = re.escape(block.text.strip())
    for shown, pattern in (
        (r"runs/7b/global_step800", r"\S+/new"),
        (r"global_step400,\ global_step600", "old"),
        (r"zero_pp_rank_1_mp_rank_00", r"(bf16_)?zero_pp_rank_1_mp_rank_00"),
        (r"got\ 4096\ bytes,\ expected\ 73664", r"got \d+ bytes, expected \d+"),
    ):
        assert shown in expected, shown
        expected = expected.replace(shown, pattern)
    _, message = damaged(name)[0][0]["errors"]["rank 1, cut"]
    assert re.fullmatch(expected, message), message


@pytest.mark.parametrize("name", NAMES)
def test_save_leaves_a_complete_tag_with_every_file_and_its_writer(damaged, name):
    _, folder = damaged(name)
    manifest = verify(folder / "new")
    assert manifest.world_size == 2
    assert {file.rank for file in manifest.files} == {0, 1}
    names = {path.name for path in (folder / "new").iterdir()} - {MANIFEST}
    assert {file.path for file in manifest.files} == names
    assert [tag.name for tag in tags.complete_tags(folder)] == ["old", "new"]
    assert tags.read_latest(folder) == "new"
    assert not (folder / "new" / MARKER).exists()


# --- Which tag is loaded -------------------------------------------------------------------------


@contextmanager
def logged():
    """Yield a list that gets what zero8 logs in the block."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zero8")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


ALLOWED = {"zero8": {"load_previous_if_damaged": True}}


def damage(folder, tag, pattern="*pp_rank_1_*optim*"):
    together(lambda: flip(min(Path(folder, tag).glob(pattern))))


def tear(folder, tag):
    """Leave a tag as a save that was interrupted does."""
    together(lambda: tags.begin(Path(folder, tag), 9, is_part=lambda path: False))


def load_by_tag(folder):
    """Return for each way to ask for a tag: what came, what was logged, steps taken."""
    strict, allowing = (make_engine(config() | section) for section in ({}, ALLOWED))
    found = {}

    def load(name, engine, **kwargs):
        result = {}

        def call():
            result["path"] = engine.load_checkpoint(folder, **kwargs)[0]

        with logged() as lines:
            result["error"] = error_of(call)
        found[name] = result | {"log": lines, "steps": engine.global_steps}
        torch.distributed.barrier()

    for step, tag in enumerate(("first", "second", "third")):
        train(strict, 1, first=step)
        strict.save_checkpoint(folder, tag=tag, save_latest=tag != "third")
    load("latest", strict)
    load("explicit", strict, tag="third")
    together(os.remove, f"{folder}/latest")
    load("no latest", strict)
    together(tags.write_latest, Path(folder), "third")
    tear(folder, "torn")
    load("explicit torn", allowing, tag="torn")
    load("explicit missing", allowing, tag="none")
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


def loaded(ranks, name):
    """Return the steps of the checkpoint that all ranks loaded, and rank 0's log."""
    assert [rank[name]["error"] for rank in ranks] == [None, None], name
    assert len({rank[name]["steps"] for rank in ranks}) == 1
    return ranks[0][name]["steps"], ranks[0][name]["log"]


def refused(ranks, name):
    """Return the message of what all ranks raised."""
    first, second = (rank[name]["error"] for rank in ranks)
    assert first == second and first is not None, name
    return first[1]


def test_load_takes_what_latest_names_or_what_is_asked_for(by_tag):
    assert loaded(by_tag, "latest")[0] == 2
    assert loaded(by_tag, "explicit")[0] == 3


def test_load_without_latest_takes_the_newest_complete_and_says_so(by_tag):
    steps, log = loaded(by_tag, "no latest")
    assert steps == 3
    assert any("has no file 'latest'; loading the newest complete, third" in line for line in log)


def test_load_of_a_damaged_checkpoint_takes_the_one_before_only_if_allowed(by_tag):
    message = refused(by_tag, "damaged, not allowed")
    assert "complete tags: first, second" in message and "load_previous_if_damaged" in message
    steps, log = loaded(by_tag, "damaged, allowed")
    assert steps == 2
    (line,) = [line for line in log if "instead" in line]
    assert "checkpoints/second instead" in line and "checkpoints/third is damaged" in line
    assert by_tag[1]["damaged, allowed"]["log"] == []
    assert loaded(by_tag, "two damaged, allowed")[0] == 1
    assert loaded(by_tag, "torn, allowed")[0] == 1


def test_load_of_an_explicit_tag_never_takes_another(by_tag):
    assert "third is damaged" in refused(by_tag, "damaged, explicit")
    assert "torn is incomplete: saving it was interrupted" in refused(by_tag, "explicit torn")
    assert "there is no such checkpoint" in refused(by_tag, "explicit missing")


def test_load_with_nothing_whole_left_lists_all_that_is_wrong(by_tag):
    message = refused(by_tag, "all damaged, allowed")
    for part in ("torn is incomplete", "first is damaged", "pp_rank_1_mp_rank_00_optim_states.pt"):
        assert part in message


# --- Other ways to save and load -----------------------------------------------------------------


def exchange_rank_1s(folder, source, target):
    """Have rank 1's states of one tag be those of another."""
    (states,) = Path(folder, source).glob("*pp_rank_1_*optim*")
    shutil.copyfile(states, Path(folder, target, states.name))


def save_and_load_otherwise(folder):
    """Return what comes of tags without a manifest, of errors of one rank, of other optimizers."""
    found = {}
    engine = make_engine(config() | {"zero8": {"keep_checkpoints": 2}})
    train(engine, 1)
    for tag in "abcd":
        engine.save_checkpoint(f"{folder}/kept", tag=tag)
    torch.distributed.barrier()
    found["kept"] = sorted(path.name for path in Path(folder, "kept").iterdir())
    engine = make_engine(config())
    train(engine, 1)
    engine.save_checkpoint(folder, tag="one")
    for rank in range(2):
        refuse = patch.object(
            base_optimizer(engine), "load_state_dict", side_effect=ValueError("bad")
        )
        with refuse if RANK == rank else nullcontext():
            found[f"refused by rank {rank}"] = error_of(engine.load_checkpoint, folder)
        torch.distributed.barrier()
    together(os.remove, f"{folder}/one/{MANIFEST}")
    with logged() as lines:
        found["old"] = [error_of(engine.load_checkpoint, folder) for _ in range(2)]
    found["old log"] = lines
    train(engine, 2)
    engine.save_checkpoint(folder, tag="two", save_latest=False)
    together(os.remove, f"{folder}/two/{MANIFEST}")
    together(lambda: exchange_rank_1s(folder, "one", "two"))
    found["mixed"] = error_of(engine.load_checkpoint, folder, tag="two")
    torch.distributed.barrier()
    together(lambda: flip_a_code(min(Path(folder, "two").glob("*pp_rank_1_*optim*"))))
    found["old, flipped"] = error_of(engine.load_checkpoint, folder, tag="two")
    torch.distributed.barrier()
    engine = make_engine(config())
    damage(folder, "one")
    together(lambda: cut(min(Path(folder, "one").glob("*pp_rank_1_*optim*"))))
    found["old, cut"] = error_of(engine.load_checkpoint, folder)
    torch.distributed.barrier()
    together(shutil.copytree, f"{folder}/kept/d", f"{folder}/sealed")
    together(os.remove, f"{folder}/sealed/{MANIFEST}")
    together(seal, Path(folder, "sealed"))
    found["sealed"] = error_of(engine.load_checkpoint, folder, tag="sealed")
    torch.distributed.barrier()
    damage(folder, "sealed")
    found["sealed, damaged"] = error_of(engine.load_checkpoint, folder, tag="sealed")
    found["again"] = error_of(engine.save_checkpoint, folder, tag="one")
    found["again loaded"] = error_of(engine.load_checkpoint, folder)
    # A job of its own holds the lock.
    with locked(Path(folder)) if RANK == 0 else nullcontext():
        torch.distributed.barrier()
        found["locked"] = error_of(engine.save_checkpoint, folder, tag="other")
    found["reserved"] = error_of(
        engine.save_checkpoint, folder, tag="x", client_state={CHECKPOINT_PARALLEL_DIMS: 1}
    )
    found["unpicklable"] = error_of(
        engine.save_checkpoint, folder, tag="x", client_state={"f": lambda: None}
    )
    found["after errors"] = error_of(engine.load_checkpoint, folder)
    with logged() as lines:
        engine.save_checkpoint(folder, tag=f"own{RANK}", save_latest=False)
    found["own tags"] = lines
    found["own tags loaded"] = error_of(engine.load_checkpoint, folder, tag=f"own{RANK}")
    unseen = patch.object(tags, "note_of", return_value=None) if RANK == 1 else nullcontext()
    with patch.object(checkpoint_save, "VISIBLE_WITHIN_S", 0.1), unseen, logged() as lines:
        engine.save_checkpoint(folder, tag="unseen")
    found["unseen"] = lines, error_of(engine.load_checkpoint, folder)
    meshed = make_engine(config(stage=3), mesh_param=(1, 2))
    groups.mesh_device = None  # DeepSpeed does not forget it
    train(meshed, 1)
    foreseen = patch.object(checkpoint_save, "_main_files", return_value=[])
    for name, what in {"same files": nullcontext(), "same files, unforeseen": foreseen}.items():
        with what:
            found[name] = error_of(meshed.save_checkpoint, f"{folder}/meshed", tag="one")
        torch.distributed.barrier()
        found[f"{name}, left"] = sorted(
            path.name for path in Path(folder, "meshed").glob("**/*") if "zero8" in path.name
        )
        torch.distributed.barrier()
    local = make_engine(config() | {"checkpoint": {"use_node_local_storage": True}})
    train(local, 1)
    local.save_checkpoint(f"{folder}/local", tag="one")
    adamw = make_engine(config(optimizer="AdamW"))
    train(adamw, 1)
    adamw.save_checkpoint(f"{folder}/adamw", tag="one")
    found["adamw"] = error_of(adamw.load_checkpoint, f"{folder}/adamw")
    torch.distributed.barrier()
    for name in ("local", "adamw"):
        paths = [*Path(folder, name).iterdir(), *Path(folder, name, "one").iterdir()]
        found[f"{name} files"] = [path.name for path in paths]
        found[f"{name} latest"] = Path(folder, name, "latest").read_bytes()
    return found


@pytest.fixture(scope="module")
def otherwise(standing_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("otherwise") / "checkpoints"
    return standing_ranks(2).run(save_and_load_otherwise, timeout_s=240, folder=str(folder)), folder


def of_both(otherwise, name):
    return [rank[name] for rank in otherwise[0]]


ERRORS = {
    "refused by rank 0": (("ValueError", "bad"), ("ValueError", "rank 0: ValueError: bad")),
    "refused by rank 1": (("ValueError", "rank 1: ValueError: bad"), ("ValueError", "bad")),
    "mixed": (("ValueError", "different steps, rank by rank [3, 1]"),) * 2,
    "old, flipped": (
        ("ValueError", "rank 1: ValueError: 8-bit moment exp_avg_sq of "),
        ("ValueError", "8-bit moment exp_avg_sq of "),
    ),
    "old, cut": (("OSError", "rank 1: "), ("RuntimeError", "")),
    "sealed, damaged": (("ValueError", "contents differ"),) * 2,
    "locked": (("OSError", "another job saves into this folder, or prunes it: process"),) * 2,
    "reserved": (("KeyError", ""),) * 2,
    "unpicklable": (("OSError", "x is incomplete: rank 0: "),) * 2,
}
"""What each rank raises."""
FINE = ("sealed", "again", "again loaded", "after errors", "adamw")


@pytest.mark.parametrize("what", ERRORS)
def test_trouble_of_one_rank_is_an_error_on_both(what, otherwise):
    """One rank's refusal, a tag without a manifest, another job, what cannot be pickled."""
    for error, (kind, text) in zip(of_both(otherwise, what), ERRORS[what], strict=True):
        assert error[0] == kind and text in error[1], error


def test_checkpoints_after_errors_are_saved_and_loaded(otherwise):
    assert {what: of_both(otherwise, what) for what in FINE} == {w: [None, None] for w in FINE}


def test_keep_checkpoints_deletes_the_oldest_after_a_save(otherwise):
    for names in of_both(otherwise, "kept"):
        assert [name for name in names if len(name) == 1] == ["c", "d"]


def test_load_of_a_tag_without_a_manifest_works_and_says_once_that_it_is_not_verified(otherwise):
    assert of_both(otherwise, "old") == [[None, None]] * 2
    (line,) = [line for line in otherwise[0][0]["old log"] if "not verified" in line]
    assert "checkpoints/one" in line
    assert otherwise[0][1]["old log"] == []


def test_load_of_a_universal_folder_says_that_such_folders_have_no_manifest(tmp_path, caplog):
    folder = tmp_path / "global_step1_universal"
    (folder / "zero").mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").touch()
    assert checkpoint_load._choice_of(tmp_path, folder.name).tag == folder.name
    assert (
        "as universal checkpoints have none" in caplog.text and "without zero8" not in caplog.text
    )


def test_save_of_other_tags_on_other_ranks_is_as_deepspeeds(otherwise):
    for lines in of_both(otherwise, "own tags"):
        assert any("without a manifest: ranks save different tags" in line for line in lines)
    folder = otherwise[1]
    assert not (folder / "own0" / MANIFEST).exists() and not (folder / "own0" / MARKER).exists()


def test_save_of_the_same_file_by_two_ranks_is_an_error_on_both(otherwise):
    for name in ("same files", "same files, unforeseen"):
        (kind, text), again = of_both(otherwise, name)
        assert (kind, text) == again and kind == "ValueError"
        assert "ranks 0 and 1 would both write " in text
        assert "zero_pp_rank_0_mp_rank_00_model_states.pt" in text and "parallel_state_sp" in text
    assert of_both(otherwise, "same files, left") == [[], []]
    # Without a manifest, with a marker: incomplete.
    assert of_both(otherwise, "same files, unforeseen, left") == [[".zero8_lock", MARKER]] * 2
    assert not (otherwise[1] / "meshed" / "latest").exists()


def test_save_into_a_folder_that_is_not_shared_is_as_deepspeeds(otherwise):
    for lines, error in of_both(otherwise, "unseen"):
        assert any("not all ranks see the files of rank 0" in line for line in lines)
        assert error is None
    folder = otherwise[1] / "unseen"
    assert not (folder / MANIFEST).exists() and not (folder / MARKER).exists()


@pytest.mark.parametrize("name", ["adamw", "local"])
def test_save_of_other_optimizers_and_on_local_disks_is_as_deepspeeds(otherwise, name):
    for files in of_both(otherwise, f"{name} files"):
        assert "latest" in files
        assert not [file for file in files if "zero8" in file and not file.endswith(".py")]
    assert of_both(otherwise, f"{name} latest") == [b"one"] * 2


def resume_alone(folder):
    """Load what two ranks saved, and of that the weights of the module alone."""
    engine = make_engine(config())
    error = error_of(engine.load_checkpoint, folder, tag="one")
    return error, error_of(engine.load_checkpoint, folder, tag="one", load_module_only=True)


@pytest.mark.slow
def test_load_by_another_number_of_ranks_says_what_to_do(otherwise, standing_ranks):
    ((error, of_module),) = standing_ranks(1).run(resume_alone, folder=str(otherwise[1]))
    assert (error[0], of_module) == ("ValueError", None)
    assert "was saved by 2 rank(s), this run has 1" in error[1]
    assert "--to zero" in error[1]


# --- States on a disk ----------------------------------------------------------------------------


def save_swapped(folder):
    """Save twice, once more under the same tag; load what is damaged; return what is held."""
    engine = make_tower(nvme_config(f"{folder}/swap"))
    train(engine, 1)
    for _ in range(2):
        engine.save_checkpoint(f"{folder}/checkpoints", tag="new")
    errors = {}
    for pattern in ("rank*0/zero8-*", "rank*1/zero8-*", "rank*1/[0-9]*"):
        for name, harm in {"flipped": flip, "cut": cut, "missing": os.remove}.items():
            together(shutil.copytree, f"{folder}/checkpoints", f"{folder}/whole")
            files = Path(folder, "checkpoints", "new", "offloaded_tensors")
            together(lambda f=files, p=pattern, h=harm: h(min(f.glob(p))))
            errors[pattern, name] = error_of(engine.load_checkpoint, f"{folder}/checkpoints")
            torch.distributed.barrier()
            together(shutil.rmtree, f"{folder}/checkpoints")
            together(shutil.move, f"{folder}/whole", f"{folder}/checkpoints")
    saved = held_everywhere(engine)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 1:  # to a program, a disk that is full: while swap files are copied
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    full = error_of(engine.save_checkpoint, f"{folder}/checkpoints", tag="full")
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    losses = train(engine, 1, first=1)
    return {"errors": errors, "saved": saved, "full": full, "losses": losses}


def load_swapped(folder):
    engine = make_tower(nvme_config(f"{folder}/swap"))
    engine.load_checkpoint(f"{folder}/checkpoints")
    return {"saved": held_everywhere(engine), "losses": train(engine, 1, first=1)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_checkpoint_of_swapped_states_is_verified_in_every_file_and_resumes(tmp_path):
    need_nvme()
    kwargs = {"timeout_s": 600, "folder": str(tmp_path)}
    saved = run_ranks(save_swapped, 2, tmp_path, **kwargs)
    assert saved[0]["errors"] == saved[1]["errors"]
    for (pattern, name), (kind, message) in saved[0]["errors"].items():
        reason = {"flipped": "contents differ", "cut": "truncated", "missing": "missing"}[name]
        writer = pattern[len("rank*")]
        assert kind == "ValueError" and reason in message, (pattern, name)
        assert f"(written by rank {writer})" in message and "offloaded_tensors/rank" in message
    for rank in saved:
        kind, message = rank["full"]
        assert kind == "OSError" and "rank 1: " in message
        assert "offloaded_tensors/rank01/" in message and "File too large" in message
    for before, after in zip(saved, run_ranks(load_swapped, 2, tmp_path, **kwargs), strict=True):
        assert difference(before["saved"], after["saved"]) == ""
        assert before["losses"] == after["losses"]
