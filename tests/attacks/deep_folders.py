# SPDX-License-Identifier: Apache-2.0
"""Paths of 2,000 folders in a manifest, and folders in each other on the disk.

All folders above 400 such paths are 800,000 paths, of 2 KB on average.  Python's shutil.rmtree
calls itself for each folder in another, and fails when a part of the tag has been deleted: zero8
must find that out before.  The folders are taken apart at the end, for the same reason.
"""

from pathlib import Path

from attack import IN_BLOCK, Attack, checkpoint, made, main, saving, sealed
from child_process import Answer, answer_of

from zero8.files.manifest import MANIFEST, MARKER, File, Manifest

PATHS, PATH_DEPTH = 400, 2000
DISK_DEPTHS = (1500, 3000)


def deep_paths(line):
    """Return what plants a tag whose manifest lists the paths, and returns a command on it."""

    def plant(folder: Path) -> list[str]:
        names = (f"{number:04d}/{'a/' * PATH_DEPTH}b" for number in range(PATHS))
        listed = tuple(File(name, 0, "0" * 32, 0) for name in names)
        (made(folder / "tags" / "t1") / MANIFEST).write_text(Manifest(1, 0, listed).text())
        return line(folder / "tags")

    return plant


def deep_tag(depth: int, line):
    """Return what makes two good tags, one with nested folders, and returns a command on them."""

    def plant(folder: Path) -> list[str]:
        for tag in ("t1", "t2"):
            sealed(folder / "tags" / tag)
        outermost, around = (folder / "tags" / "t1" / name for name in ("d", "around"))
        made(outermost)
        for _ in range(depth):
            outermost.rename(made(around) / "d")
            around.rename(outermost)
        return line(folder / "tags")

    return plant


def then_apart(line: list[str], output: Path, seconds: float) -> Answer:
    """Run a command; take the folders in each other apart."""
    answer, outermost = answer_of(line, output, seconds), output.parent / "tags" / "t1" / "d"
    while (outermost / "d").is_dir():
        (outermost / "d").rename(outermost.with_name("next"))
        outermost.rmdir()
        outermost.with_name("next").rename(outermost)
    return answer


def save(tags: Path) -> list[str]:
    return saving(tags, "t1")


def verify(tags: Path) -> list[str]:
    return checkpoint("verify", tags / "t1")


def prune(tags: Path) -> list[str]:
    return checkpoint("prune", tags, "--keep", 1)


def refused_first(_: Path, answer: Answer) -> str:
    return "entered the block" if IN_BLOCK in answer.text else ""


STAYS = tuple(
    f"tags/{name}" for name in ("t2", *(f"t1/{n}" for n in (MANIFEST, MARKER, ".metadata")))
)

ATTACKS = (
    Attack("listed paths, verify", deep_paths(verify), (1,), (MANIFEST,)),
    Attack("listed paths, save", deep_paths(save), (0,)),
    *(
        Attack(
            f"{depth:,} folders on the disk, {line.__name__}",
            deep_tag(depth, line),
            statuses,
            ("t1",),
            STAYS,
            check=refused_first,
            run=then_apart,
        )
        for depth in DISK_DEPTHS
        for line, statuses in ((verify, (1, 2)), (prune, (1, 2)), (save, (1,)))
    ),
)

if __name__ == "__main__":
    main(ATTACKS)
