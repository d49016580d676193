# SPDX-License-Identifier: Apache-2.0
"""Named pipes and an endless device in the places of files that zero8 reads.

Whoever opens a pipe that nobody writes to waits for ever, and /dev/zero has no end.  zero8 must
answer, and say which file it is.
"""

import os
from pathlib import Path

from attack import Attack, checkpoint, made, main, sealed, whole

from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import seal

HASH_OF_NOTHING = "99aa06d3014798d86001c324468d497f"
RANK = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def verify_with_pipe(name: str):
    """Return what plants a pipe of this name in a folder whose other files are good."""

    def plant(folder: Path) -> list[str]:
        tag = whole(folder / "tags" / "t1")
        if name in ("latest", RANK):  # which are looked for where there are no .metadata
            (tag / ".metadata").unlink()
        (tag / name).unlink(missing_ok=True)
        os.mkfifo(tag / name)
        return checkpoint("verify", tag)

    return plant


def verify_endless_manifest(folder: Path) -> list[str]:
    (whole(folder / "t1") / MANIFEST).symlink_to("/dev/zero")
    return checkpoint("verify", folder / "t1")


def verify_listed_pipe(folder: Path) -> list[str]:
    tag = sealed(folder / "t1")
    (tag / "shard.pt").write_bytes(b"data")
    seal(tag)
    (tag / "shard.pt").unlink()
    os.mkfifo(tag / "shard.pt")
    return checkpoint("verify", tag)


def verify_listed_empty_pipe(folder: Path) -> list[str]:
    listed = File("shard.pt", 0, HASH_OF_NOTHING, 0)
    manifest = Manifest.read(sealed(folder / "t1"))
    Manifest.of(1, 0, [*manifest.files, listed]).write(folder / "t1")
    os.mkfifo(folder / "t1" / "shard.pt")
    return checkpoint("verify", folder / "t1")


def seal_with_pipe(folder: Path) -> list[str]:
    os.mkfifo(whole(folder / "tags" / "t1") / "a_pipe")
    return checkpoint("seal", folder / "tags" / "t1")


def seal_beside_piped_manifest(folder: Path) -> list[str]:
    os.mkfifo(made(folder / "tags" / "planted") / MANIFEST)
    return checkpoint("seal", whole(folder / "tags" / "t1"))


ATTACKS = (
    Attack("manifest that is a pipe", verify_with_pipe(MANIFEST), (1,), (MANIFEST,)),
    Attack("manifest that is a link to a device", verify_endless_manifest, (1,), (MANIFEST,)),
    Attack("marker that is a pipe", verify_with_pipe(MARKER), (1, 2)),
    Attack("listed file that is a pipe", verify_listed_pipe, (1,), ("shard.pt",)),
    Attack("listed file of 0 bytes that is a pipe", verify_listed_empty_pipe, (1,), ("shard.pt",)),
    Attack("latest that is a pipe", verify_with_pipe("latest"), (1, 2)),
    Attack("metadata that is a pipe", verify_with_pipe(".metadata"), (1, 2), (".metadata",)),
    Attack("states of a rank that are a pipe", verify_with_pipe(RANK), (1, 2), (RANK,)),
    Attack("folder to seal with a pipe in it", seal_with_pipe, (2,), ("a_pipe",)),
    Attack("folder to seal beside a piped manifest", seal_beside_piped_manifest, (0,)),
)

if __name__ == "__main__":
    main(ATTACKS)
