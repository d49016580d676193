# SPDX-License-Identifier: Apache-2.0
"""Attacks on commands that write or delete: planted links, tags, and files `latest`.

Names of files that zero8 is about to write are known beforehand, so whoever may write in a shared
folder can plant a link there to a file of another user.  A manifest with any sequence number is
easily written: a tag that is not whole must not count among those to keep, and without a readable
`latest` nobody knows what may be deleted.
"""

import json
import os
from pathlib import Path

import pytest
import xxhash
from attack import (
    IN_BLOCK,
    OUTSIDE,
    Attack,
    checkpoint,
    made,
    outside,
    python,
    refused_first,
    saving,
    sealed,
    whole,
)

from zero8.files.atomic import TEMPORARY
from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import LOCK, verify

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


def lock(tags: Path) -> str:
    """The lock by itself, as DeepSpeed's engine takes it when it saves."""
    return python(f"""
from pathlib import Path
from zero8.files.tags import locked
with locked(Path({str(tags)!r})):
    pass
""")


def names_lock(_: Path, status: int, text: str) -> str:
    return "" if status == 0 or LOCK in text else f"refuses, and does not name {LOCK}"


def listed_behind_link(folder: Path) -> str:
    """Saving a tag again deletes the files of the earlier save that its manifest lists."""
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


# --- Folders in each other -----------------------------------------------------------------------


def deep_tag(line):
    """Return what nests folders in one of two tags, and returns a command on them.

    shutil.rmtree calls itself for each folder in another, and fails when a part of the tag has been
    deleted: zero8 must find that out before.
    """

    def plant(folder: Path) -> str:
        tags = two_tags(folder)
        outermost, around = tags / "t1" / "d", tags / "t1" / "around"
        made(outermost)
        for _ in range(DEPTH):
            outermost.rename(made(around) / "d")
            around.rename(outermost)
        return line(tags)

    return plant


def then_apart(folder: Path, status: int, text: str) -> str:
    """Take the folders apart, for the same reason; the block of a save must not be entered."""
    outermost = folder / "tags" / "t1" / "d"
    while (outermost / "d").is_dir():
        (outermost / "d").rename(outermost.with_name("next"))
        outermost.rmdir()
        outermost.with_name("next").rename(outermost)
    return refused_first(folder, status, text)


DEPTH = 1500  # more than Python's limit of calls in each other
DEEP_STAYS = ("tags/t2", *(f"tags/t1/{name}" for name in (MANIFEST, MARKER, ".metadata")))

# --- Planted tags --------------------------------------------------------------------------------

LAST = 2**63 - 1


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


def with_the_last_sequence(is_complete: bool, line):
    """Return what plants a tag whose number no manifest can exceed beside a good one."""

    def plant(folder: Path) -> str:
        sealed(folder / "tags" / "good")
        planted = folder / "tags" / "planted"
        if is_complete:
            files = Manifest.read(sealed(planted)).files
            (planted / MANIFEST).write_text(Manifest(LAST, 0, files).text())
        else:
            (made(planted) / MARKER).write_text(json.dumps({"sequence": LAST, "note": ""}))
        return line(folder / "tags")

    return plant


def save_new(tags: Path) -> str:
    return saving(tags, "new")


def seal_new(tags: Path) -> str:
    return checkpoint("seal", whole(tags / "new"))


def whole_or_refused(folder: Path, status: int, text: str) -> str:
    if status == 0:
        verify(folder / "tags" / "new")
        return ""
    if IN_BLOCK in text:
        return "refuses after the block has been entered"
    return "" if "planted" in text else "refuses, and does not name the planted tag"


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


# --- Two at once ---------------------------------------------------------------------------------

ROUNDS = 12


def two_at_once(folder: Path) -> str:
    """Each must do its work, or say that the other holds the lock."""
    for number in range(ROUNDS):
        for tag in range(6):
            sealed(folder / f"round{number}" / f"t{tag}")
    return f"""
import os
from zero8 import cli
for number in range({ROUNDS}):
    line = ["checkpoint", "prune", {str(folder)!r} + f"/round{{number}}", "--keep", "1"]
    children = []
    for _ in range(2):
        children.append(os.fork())
        if not children[-1]:
            status = cli.main(line)
            sys.stdout.flush()
            os._exit(status)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert min(statuses) == 0 and max(statuses) in (0, 2), statuses
"""


def one_left(folder: Path, status: int, text: str) -> str:
    if "[Errno 2]" in text or "No such file" in text:
        return "one process says that a file is gone"
    if any("zero8 checkpoint" in line and LOCK not in line for line in text.splitlines()):
        return "one fails, and does not name the lock"
    left = {len(list(folder.glob(f"round{n}/t*"))) for n in range(ROUNDS)}
    return "" if left == {1} else f"got {left} tags left, expected one in each round"


ATTACKS = (
    Attack("link in place of the new manifest", seal_over_link, (0, 2)),
    Attack("link in place of the new marker", prune_over_link, (0, 2)),
    Attack("link in place of the new latest", latest_over_link, (0, 1)),
    *(
        Attack(
            f"lock is a {kind}, {line.__name__}", with_lock(link, line), (0, 1, 2), check=names_lock
        )
        for kind, link in (("symbolic link", os.symlink), ("hard link", os.link))
        for line in (prune, save, lock)
    ),
    *(
        Attack(name, plant, (1,), ("Error: ", named), check=refused_first)
        for name, plant, named in (
            ("listed file behind a link", listed_behind_link, "sub"),
            ("tag that is a link", tag_that_is_a_link(sealed), "t1"),
            ("unsealed tag that is a link", tag_that_is_a_link(whole), "t1"),
        )
    ),
    *(
        Attack(
            f"{DEPTH:,} folders, {name}",
            deep_tag(line),
            (1, 2),
            ("t1",),
            DEEP_STAYS,
            check=then_apart,
        )
        for name, line in (
            ("verify", lambda tags: checkpoint("verify", tags / "t1")),
            ("prune", prune),
            ("save", lambda tags: saving(tags, "t1")),
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
    *(
        Attack(
            f"last sequence, {'complete' if is_complete else 'incomplete'}, {line.__name__}",
            with_the_last_sequence(is_complete, line),
            (0, 1, 2),
            stays=("tags/good", "tags/planted"),
            check=whole_or_refused,
        )
        for is_complete in (True, False)
        for line in (save_new, seal_new)
    ),
    Attack(
        "last sequence, verify",
        with_the_last_sequence(True, lambda tags: checkpoint("verify", tags / "planted")),
        (1,),
        (MANIFEST,),
    ),
    Attack("interrupted", seal_interrupted(), (2,), ("incomplete", "--force"), check=no_manifest),
    Attack("interrupted, by force", seal_interrupted("--force"), (0,)),
    Attack("two at once", two_at_once, (0,), check=one_left),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_planted_files_get_the_expected_answer(attack, commands, tmp_path):
    assert attack.wrong(commands, tmp_path) == []
