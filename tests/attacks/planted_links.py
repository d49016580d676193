# SPDX-License-Identifier: Apache-2.0
"""Links in the places of files that zero8 is about to write: temporary files and the lock.

Their names are known beforehand, so whoever may write in a shared folder of checkpoints can plant a
link there to a file of another user.  zero8 must not write through it.
"""

import os
from pathlib import Path

from attack import Attack, checkpoint, main, outside, python, saving, sealed, whole
from child_process import Answer

from zero8.files.atomic import TEMPORARY
from zero8.files.manifest import MANIFEST, MARKER

LOCK = ".zero8_lock"


def seal_over_link(folder: Path) -> list[str]:
    (whole(folder / "t1") / f".{MANIFEST}{TEMPORARY}").symlink_to(outside(folder))
    return checkpoint("seal", folder / "t1")


def prune_over_link(folder: Path) -> list[str]:
    (sealed(folder / "tags" / "t1") / f".{MARKER}{TEMPORARY}").symlink_to(outside(folder))
    sealed(folder / "tags" / "t2")
    return checkpoint("prune", folder / "tags", "--keep", 1)


def latest_over_link(folder: Path) -> list[str]:
    sealed(folder / "tags" / "t1")
    (folder / "tags" / f".latest{TEMPORARY}").symlink_to(outside(folder))
    return saving(folder / "tags", "t2")


def with_lock(link, line):
    """Return what makes the lock of a folder of tags a link, and then returns a command on it."""

    def plant(folder: Path) -> list[str]:
        for tag in ("t1", "t2"):
            sealed(folder / "tags" / tag)
        link(outside(folder), folder / "tags" / LOCK)
        return line(folder / "tags")

    return plant


def prune(tags: Path) -> list[str]:
    return checkpoint("prune", tags, "--keep", 1)


def save(tags: Path) -> list[str]:
    return saving(tags, "t", keep=1)


def lock(tags: Path) -> list[str]:
    """The lock by itself, as DeepSpeed's engine takes it when it saves."""
    code = """
from pathlib import Path
from zero8.files.tags import locked
with locked(Path({tags!r})):
    pass
"""
    return python(code, tags=str(tags))


def names_lock(_: Path, answer: Answer) -> str:
    return "" if answer.status == 0 or LOCK in answer.text else f"refuses, and does not name {LOCK}"


ATTACKS = (
    Attack("link in place of the new manifest", seal_over_link, (0, 2)),
    Attack("link in place of the new marker", prune_over_link, (0, 2)),
    Attack("link in place of the new latest", latest_over_link, (0, 1)),
    *(
        Attack(
            f"lock that is a {kind}, {line.__name__}",
            with_lock(link, line),
            (0, 1, 2),
            check=names_lock,
        )
        for kind, link in (("symbolic link", os.symlink), ("hard link", os.link))
        for line in (prune, save, lock)
    ),
)

if __name__ == "__main__":
    main(ATTACKS)
