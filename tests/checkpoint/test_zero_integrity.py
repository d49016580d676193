# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine on two ranks: complete and verified, or an error on both."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from ranks import error_of
from zero_worker import config, difference, held, make_engine, train

from zero8.integrity import tags
from zero8.integrity.manifest import MANIFEST, MARKER
from zero8.integrity.seal import verify

RANK = int(os.environ.get("RANK", 0))


def flip(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
def test_load_after_the_files_are_whole_again_gives_what_was_saved(damaged, name):
    for rank in damaged(name)[0]:
        assert rank["path"] is not None
        assert rank["loaded"] == ""


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
