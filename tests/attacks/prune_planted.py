# SPDX-License-Identifier: Apache-2.0
"""Planted tags, and odd or damaged files `latest`, by which prune would delete the good tag.

A manifest with any sequence number is easily written.  A tag that is not whole must not count among
those to keep, and without a readable `latest` nobody knows what may be deleted.
"""

from pathlib import Path

from attack import Attack, checkpoint, made, main, sealed

from zero8.files.manifest import Manifest

KEPT = ("tags/t1",)
BOTH = ("tags/t1", "tags/t2")


def beside(spoil):
    """Return what plants a tag of sequence 99, spoiled by a function, beside a good one."""

    def plant(folder: Path) -> list[str]:
        sealed(folder / "tags" / "t1")
        planted = sealed(folder / "tags" / "planted")
        Manifest.of(99, 0, Manifest.read(planted).files).write(planted)
        spoil(planted / "__0_0.distcp")
        return checkpoint("prune", folder / "tags", "--keep", 1)

    return plant


def shorten(path: Path) -> None:
    path.write_bytes(b"short")


def empty(folder: Path) -> list[str]:
    """Return the command on two good tags, and one whose manifest lists no file."""
    for tag in ("t1", "t2"):
        sealed(folder / "tags" / tag)
    Manifest.of(2**52, 0, []).write(made(folder / "tags" / "planted"))
    return checkpoint("prune", folder / "tags", "--keep", 2)


def latest(content: bytes):
    """Return what makes two good tags, and a file `latest` with this content."""

    def plant(folder: Path) -> list[str]:
        for tag in ("t1", "t2"):
            sealed(folder / "tags" / tag)
        (folder / "tags" / "latest").write_bytes(content)
        return checkpoint("prune", folder / "tags", "--keep", 1)

    return plant


ATTACKS = (
    Attack("planted tag without its file", beside(Path.unlink), (0, 1, 2), stays=KEPT),
    Attack("planted tag with a short file", beside(shorten), (0, 1, 2), stays=KEPT),
    Attack("planted tag of no files", empty, (0,), ("deleted nothing",), BOTH),
    Attack("latest with a slash at its end", latest(b"t1/"), (0, 1, 2), stays=KEPT),
    Attack("latest with ./ at its beginning", latest(b"./t1"), (0, 1, 2), stays=KEPT),
    *(
        Attack(f"latest of {content!r}", latest(content), (1, 2), ("latest", "damaged"), BOTH)
        for content in (b"\xff", b"../x", b"", b"t1\0")
    ),
)

if __name__ == "__main__":
    main(ATTACKS)
