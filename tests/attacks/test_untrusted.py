# SPDX-License-Identifier: Apache-2.0
"""Attacks on commands that read: code in files, pipes, links, and files that claim too much.

A pickle can stand before the zip, or in a record DATA.PKL beside data.pkl: torch decides by the
first four bytes whether a file is a zip, and looks up records without regard to case.  Whoever
opens a pipe that nobody writes to waits for ever, and /dev/zero has no end.
"""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from attack import OUTSIDE, Attack, checkpoint, made, outside, sealed, whole
from crafted import FILES, GOOD_FILES, METADATA, Call, dcp_folder, metadata, rezipped
from places import GOLDEN

from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import seal

# --- Code in files, and names that lead out of the target ----------------------------------------

TAG = "step3"
RANK, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


SPOILED = {
    "in its place": lambda data, code: rezipped(data, {"data.pkl": code}),
    "before the zip": lambda data, code: code + data,
    "in other letters": lambda data, code: rezipped(data, {"DATA.PKL": code}),
}


def code_in(folder: Path) -> bytes:
    """Return a pickle that makes a file outside."""
    return pickle.dumps(Call(os.system, f"touch {outside(folder).parent}/ran"), 2)


def running_code(name: str, where: str):
    """Return what copies a checkpoint of ZeRO-2, one of whose files runs code that makes a file."""

    def plant(folder: Path) -> str:
        shutil.copytree(GOLDEN / "zero2_checkpoint", folder / "tags")
        path = folder / "tags" / TAG / name
        path.write_bytes(SPOILED[where](path.read_bytes(), code_in(folder)))
        return checkpoint("convert", folder / "tags", folder / "made", "--to", "zero")

    return plant


def parameter_called(name: str):
    """A universal checkpoint has a folder for each parameter, called as the parameter is."""

    def plant(folder: Path) -> str:
        outside(folder)
        moments = {which: torch.ones(4, 64) for which in ("exp_avg", "exp_avg_sq")}
        group = {"params": [0], "param_names": [name]}
        optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [group]}
        content = {"model": {name: torch.ones(4, 64)}, "optimizer": optimizer}
        torch.save(content, folder / "plain.pt")
        return checkpoint("convert", folder / "plain.pt", folder / "made", "--to", "zero")

    return plant


def tag_behind_link(folder: Path) -> str:
    shutil.copytree(GOLDEN / "zero2_checkpoint", folder / OUTSIDE)
    (made(folder / "tags") / "in").symlink_to(folder / OUTSIDE)
    (folder / "tags" / "latest").write_text(f"in/{TAG}")
    return checkpoint("convert", folder / "tags", folder / "made", "--to", "zero")


# --- Odd manifests -------------------------------------------------------------------------------

LONG = "x" * 300


def folder_for_manifest(folder: Path) -> str:
    (whole(folder / "t1") / MANIFEST).mkdir()
    return checkpoint("verify", folder / "t1")


def manifest_linked_to(target: str):
    def plant(folder: Path) -> str:
        (whole(folder / "t1") / MANIFEST).symlink_to(target)
        return checkpoint("verify", folder / "t1")

    return plant


def listing_too(file: File, make=lambda path: None):
    """Return what lists one more file in a manifest, and makes something in its place."""

    def plant(folder: Path) -> str:
        files = Manifest.read(sealed(folder / "t1")).files
        Manifest.of(1, 0, [*files, file]).write(folder / "t1")
        make(folder / "t1" / file.path)
        return checkpoint("verify", folder / "t1")

    return plant


def listed_link(folder: Path) -> str:
    listed = sealed(folder / "t1") / "__0_0.distcp"
    target = outside(folder)
    listed.replace(target)
    listed.symlink_to(target)
    return checkpoint("verify", folder / "t1")


# --- Files and folders that do not fit -----------------------------------------------------------


def convert(source: Path) -> str:
    """A command that reads all there is."""
    return checkpoint("convert", source, source.with_name("made"), "--to", "plain")


def crafted_file(make):
    def plant(folder: Path) -> str:
        outside(folder)
        (folder / "crafted").write_bytes(make())
        return convert(folder / "crafted")

    return plant


def crafted_metadata(make):
    def plant(folder: Path) -> str:
        outside(folder)
        return checkpoint("verify", dcp_folder(folder / "crafted", make()))

    return plant


def code_as_file(folder: Path) -> str:
    (folder / "crafted").write_bytes(code_in(folder))
    return convert(folder / "crafted")


def code_as_metadata(folder: Path) -> str:
    return checkpoint("verify", dcp_folder(folder / "crafted", code_in(folder)))


def tags_for_ever(folder: Path) -> str:
    outside(folder)
    (made(folder / "crafted") / "latest").write_text("tag")
    (folder / "crafted" / "tag").symlink_to(".")
    return convert(folder / "crafted")


# --- Pipes ---------------------------------------------------------------------------------------

HASH_OF_NOTHING = xxhash.xxh3_128_hexdigest(b"")


def piped(name: str):
    """Return what plants a pipe of this name in a folder whose other files are good."""

    def plant(folder: Path) -> str:
        tag = whole(folder / "tags" / "t1")
        if name in ("latest", RANK):  # which are looked for where there are no .metadata
            (tag / ".metadata").unlink()
        (tag / name).unlink(missing_ok=True)
        os.mkfifo(tag / name)
        return checkpoint("verify", tag)

    return plant


def listed_pipe(folder: Path) -> str:
    tag = sealed(folder / "t1")
    (tag / "shard.pt").write_bytes(b"data")
    seal(tag)
    (tag / "shard.pt").unlink()
    os.mkfifo(tag / "shard.pt")
    return checkpoint("verify", tag)


def seal_with_pipe(folder: Path) -> str:
    os.mkfifo(whole(folder / "tags" / "t1") / "a_pipe")
    return checkpoint("seal", folder / "tags" / "t1")


def seal_beside_piped_manifest(folder: Path) -> str:
    os.mkfifo(made(folder / "tags" / "planted") / MANIFEST)
    return checkpoint("seal", whole(folder / "tags" / "t1"))


ATTACKS = (
    *(
        Attack(f"os.system in {name} {where}", running_code(name, where), statuses, says)
        for name in (RANK, MODEL)
        for where, statuses, says in (
            ("in its place", (1,), (name, "system")),
            ("before the zip", (1,), (name,)),
            ("in other letters", (0, 1), ()),
        )
    ),
    *(
        Attack(f"parameter {name}", parameter_called(name), (1,), ("which cannot name a folder",))
        for name in (f"{'../' * 4}{OUTSIDE}/evil", "/tmp/evil", "..")
    ),
    Attack("tag behind a link", tag_behind_link, (1,), (f"in/{TAG}",)),
    Attack("folder as manifest", folder_for_manifest, (1,), (MANIFEST,)),
    Attack("manifest linked to itself", manifest_linked_to(MANIFEST), (1,), (MANIFEST,)),
    Attack("manifest linked to a device", manifest_linked_to("/dev/zero"), (1,), (MANIFEST,)),
    Attack("name of 300 letters", listing_too(File(LONG, 1, "0" * 32, 0)), (1,), (LONG[:100],)),
    Attack("listed link", listed_link, (1,), ("__0_0.distcp", "link")),
    Attack("code as a file", code_as_file, (1,), ("crafted",)),
    Attack("code as metadata", code_as_metadata, (1,), ("crafted/.metadata", "system")),
    Attack("tags for ever", tags_for_ever, (1,), ("crafted",)),
    *(
        Attack(f"file: {name}", crafted_file(make), (1,), ("crafted",))
        for name, make in FILES.items()
    ),
    *(
        Attack(f"metadata: {name}", crafted_metadata(make), (1,), ("crafted",))
        for name, make in METADATA.items()
    ),
    # Of the same make: otherwise they would be refused for what is not meant.
    *(Attack(f"good file {name}", crafted_file(make), (0,)) for name, make in GOOD_FILES.items()),
    Attack("good metadata", crafted_metadata(metadata), (0,)),
    *(
        Attack(f"pipe as {name}", piped(name), statuses, says)
        for name, statuses, says in (
            (MANIFEST, (1,), (MANIFEST,)),
            (MARKER, (1, 2), ()),
            ("latest", (1, 2), ()),
            (".metadata", (1, 2), (".metadata",)),
            (RANK, (1, 2), (RANK,)),
        )
    ),
    Attack("listed pipe", listed_pipe, (1,), ("shard.pt",)),
    Attack(
        "listed pipe of 0 bytes",
        listing_too(File("shard.pt", 0, HASH_OF_NOTHING, 0), os.mkfifo),
        (1,),
        ("shard.pt",),
    ),
    Attack("pipe in a folder to seal", seal_with_pipe, (2,), ("a_pipe",)),
    Attack("piped manifest beside one", seal_beside_piped_manifest, (0,)),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_untrusted_folder_gets_the_expected_answer(attack, commands, tmp_path):
    assert attack.wrong(commands, tmp_path) == []
