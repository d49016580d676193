# SPDX-License-Identifier: Apache-2.0
"""Tags whose files lie elsewhere, behind links, and which are then saved again.

Saving a tag again deletes the files of the earlier save that its manifest lists.  A manifest with
the right hash that lists sub/precious, where sub is a link, must not make zero8 delete a file of
another folder, nor may a tag that is itself a link.
"""

from pathlib import Path

import xxhash
from attack import IN_BLOCK, OUTSIDE, Attack, main, outside, saving, sealed, whole
from child_process import Answer

from zero8.files.manifest import File, Manifest


def listed_behind_link(folder: Path) -> list[str]:
    precious = outside(folder)
    tag = sealed(folder / "tags" / "t1")
    (tag / "sub").symlink_to(precious.parent)
    data = precious.read_bytes()
    listed = File("sub/precious", len(data), xxhash.xxh3_128_hexdigest(data), 0)
    Manifest.of(1, 0, [*Manifest.read(tag).files, listed]).write(tag)
    return saving(folder / "tags", "t1")


def tag_that_is_a_link(folder: Path) -> list[str]:
    sealed(folder / OUTSIDE)
    sealed(folder / "tags" / "t0")
    (folder / "tags" / "t1").symlink_to(folder / OUTSIDE)
    return saving(folder / "tags", "t1")


def unsealed_tag_that_is_a_link(folder: Path) -> list[str]:
    whole(folder / OUTSIDE)
    sealed(folder / "tags" / "t0")
    (folder / "tags" / "t1").symlink_to(folder / OUTSIDE)
    return saving(folder / "tags", "t1")


def refused_first(_: Path, answer: Answer) -> str:
    return "entered the block" if IN_BLOCK in answer.text else ""


ATTACKS = tuple(
    Attack(name, plant, (1,), ("Error: ", named), check=refused_first)
    for name, plant, named in (
        ("listed file behind a link", listed_behind_link, "sub"),
        ("tag that is a link", tag_that_is_a_link, "t1"),
        ("unsealed tag that is a link", unsealed_tag_that_is_a_link, "t1"),
    )
)

if __name__ == "__main__":
    main(ATTACKS)
