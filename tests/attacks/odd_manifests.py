# SPDX-License-Identifier: Apache-2.0
"""Manifests that are no files, or that list what is no file of their folder.

verify must call the folder damaged, with status 1, not fail with an error of the system.  A listed
file that is a link to an outside file is none of the folder's, even if its contents are right.
"""

from pathlib import Path

from attack import Attack, checkpoint, main, outside, sealed, whole

from zero8.files.manifest import MANIFEST, File, Manifest

LONG = "x" * 300


def folder_for_manifest(folder: Path) -> list[str]:
    (whole(folder / "t1") / MANIFEST).mkdir()
    return checkpoint("verify", folder / "t1")


def link_to_itself(folder: Path) -> list[str]:
    (whole(folder / "t1") / MANIFEST).symlink_to(MANIFEST)
    return checkpoint("verify", folder / "t1")


def long_name(folder: Path) -> list[str]:
    files = Manifest.read(sealed(folder / "t1")).files
    Manifest.of(1, 0, [*files, File(LONG, 1, "0" * 32, 0)]).write(folder / "t1")
    return checkpoint("verify", folder / "t1")


def link_to_outside(folder: Path) -> list[str]:
    listed = sealed(folder / "t1") / "__0_0.distcp"
    target = outside(folder)
    listed.replace(target)
    listed.symlink_to(target)
    return checkpoint("verify", folder / "t1")


ATTACKS = (
    Attack("folder as manifest", folder_for_manifest, (1,), (MANIFEST,)),
    Attack("link to itself as manifest", link_to_itself, (1,), (MANIFEST,)),
    Attack("listed file with a name of 300 letters", long_name, (1,), (LONG[:100],)),
    Attack("listed file that is a link", link_to_outside, (1,), ("__0_0.distcp", "link")),
)

if __name__ == "__main__":
    main(ATTACKS)
