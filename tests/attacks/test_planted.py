# SPDX-License-Identifier: Apache-2.0
"""Attacks on commands that write or delete: planted links, tags, and files `latest`.

Names of files that zero8 is about to write are known beforehand, so whoever may write in a shared
folder can plant a link there to a file of another user.  A manifest with any sequence number is
easily written: a tag that is not whole must not count among those to keep, and without a readable
`latest` nobody knows what may be deleted.
"""

import os
from pathlib import Path

import pytest
import xxhash
from attack import (
    OUTSIDE,
    Attack,
    checkpoint,
    made,
    outside,
    refused_first,
    saving,
    sealed,
    whole,
)

from zero8.files.atomic import TEMPORARY
from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import LOCK

BOTH = ("tags/t1", "tags/t2")


def prune(tags: Path) -> str:
    return checkpoint("prune", tags, "--keep", 1)


def two_tags(folder: Path) -> Path:
    for tag in ("t1", "t2"):
        sealed(folder / "tags" / tag)
    return folder / "tags"


# --- Links in the places of files to write, and in tags to save again ----------------------------


def seal_over_link(folder: Path) -> str:
    (whole(folder / "t1") / f".{MANIFEST}{TEMPORARY}").symlink_to(outside(folder))
    return checkpoint("seal", folder / "t1")


def prune_over_link(folder: Path) -> str:
    tags = two_tags(folder)
    (tags / "t1" / f".{MARKER}{TEMPORARY}").symlink_to(outside(folder))
    return prune(tags)


def latest_over_link(folder: Path) -> str:
    sealed(folder / "tags" / "t1")
    (folder / "tags" / f".latest{TEMPORARY}").symlink_to(outside(folder))
    return saving(folder / "tags", "t2")


def with_lock(link, line):
    """Return what makes the lock of a folder of tags a link, and then returns a command on it."""

    def plant(folder: Path) -> str:
        tags = two_tags(folder)
        link(outside(folder), tags / LOCK)
        return line(tags)

    return plant


def save(tags: Path) -> str:
    return saving(tags, "t", keep=1)


def names_lock(_: Path, status: int, text: str) -> str:
    return "" if status == 0 or LOCK in text else f"refuses, and does not name {LOCK}"


def listed_behind_link(folder: Path) -> str:
    """Saving a tag again deletes the files that its manifest lists."""
    precious, tag = outside(folder), sealed(folder / "tags" / "t1")
    (tag / "sub").symlink_to(precious.parent)
    data = precious.read_bytes()
    listed = File("sub/precious", len(data), xxhash.xxh3_128_hexdigest(data), 0)
    Manifest.of(1, 0, [*Manifest.read(tag).files, listed]).write(tag)
    return saving(folder / "tags", "t1")


def tag_that_is_a_link(make):
    def plant(folder: Path) -> str:
        make(folder / OUTSIDE)
        sealed(folder / "tags" / "t0")
        (folder / "tags" / "t1").symlink_to(folder / OUTSIDE)
        return saving(folder / "tags", "t1")

    return plant


# --- Planted tags --------------------------------------------------------------------------------


def spoiled(spoil):
    """Return what plants a tag of sequence 99, spoiled by a function, beside a good one."""

    def plant(folder: Path) -> str:
        sealed(folder / "tags" / "t1")
        planted = sealed(folder / "tags" / "planted")
        Manifest.of(99, 0, Manifest.read(planted).files).write(planted)
        spoil(planted / "__0_0.distcp")
        return prune(folder / "tags")

    return plant


def empty(folder: Path) -> str:
    tags = two_tags(folder)
    Manifest.of(2**52, 0, []).write(made(tags / "planted"))
    return checkpoint("prune", tags, "--keep", 2)


def latest(content: bytes):
    def plant(folder: Path) -> str:
        tags = two_tags(folder)
        (tags / "latest").write_bytes(content)
        return prune(tags)

    return plant


def seal_interrupted(*options: str):
    """With a manifest it would pass as complete, and prune would delete whole tags for it."""

    def plant(folder: Path) -> str:
        tag = whole(folder / "t1")
        (tag / MARKER).write_text('{"sequence": 1, "note": ""}')
        (tag / "__0_0.distcp").unlink()
        return checkpoint("seal", *options, tag)

    return plant


def no_manifest(folder: Path, status: int, text: str) -> str:
    return "has written a manifest" if (folder / "t1" / MANIFEST).exists() else ""


ATTACKS = (
    Attack("link in place of the new manifest", seal_over_link, (0, 2)),
    Attack("link in place of the new marker", prune_over_link, (0, 2)),
    Attack("link in place of the new latest", latest_over_link, (0, 1)),
    *(
        Attack(
            f"lock is a {kind}, {line.__name__}", with_lock(link, line), (0, 1, 2), check=names_lock
        )
        for kind, link in (("symbolic link", os.symlink), ("hard link", os.link))
        for line in (prune, save)
    ),
    *(
        Attack(name, plant, (1,), ("Error: ", named), check=refused_first)
        for name, plant, named in (
            ("listed file behind a link", listed_behind_link, "sub"),
            ("tag that is a link", tag_that_is_a_link(sealed), "t1"),
            ("unsealed tag that is a link", tag_that_is_a_link(whole), "t1"),
        )
    ),
    Attack("planted tag without its file", spoiled(Path.unlink), (0, 1, 2), stays=BOTH[:1]),
    Attack(
        "planted tag with a short file",
        spoiled(lambda path: path.write_bytes(b"short")),
        (0, 1, 2),
        stays=BOTH[:1],
    ),
    Attack("planted tag of no files", empty, (0,), ("deleted nothing",), BOTH),
    *(
        Attack(f"latest of {content!r}", latest(content), (0, 1, 2), stays=BOTH[:1])
        for content in (b"t1/", b"./t1")
    ),
    *(
        Attack(f"latest of {content!r}", latest(content), (1, 2), ("latest", "damaged"), BOTH)
        for content in (b"\xff", b"../x", b"", b"t1\0")
    ),
    Attack("interrupted", seal_interrupted(), (2,), ("incomplete", "--force"), check=no_manifest),
    Attack("interrupted, by force", seal_interrupted("--force"), (0,)),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_planted_files_get_the_expected_answer(attack, commands, tmp_path):
    assert attack.wrong(commands, tmp_path) == []
