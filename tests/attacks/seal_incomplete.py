# SPDX-License-Identifier: Apache-2.0
"""A tag whose saving was interrupted, which lacks a rank's file, and which is then sealed.

With a manifest it would pass as complete, and prune would delete whole tags in its favour.  seal
must refuse it unless it is asked for by --force.
"""

from pathlib import Path

from attack import Attack, checkpoint, main, whole
from child_process import Answer

from zero8.files.manifest import MANIFEST, MARKER


def interrupted(*options: str):
    """Return what makes such a tag and seals it."""

    def plant(folder: Path) -> list[str]:
        tag = whole(folder / "tags" / "t1")
        (tag / MARKER).write_text('{"sequence": 1, "note": ""}')
        (tag / "__0_0.distcp").unlink()
        return checkpoint("seal", *options, tag)

    return plant


def no_manifest(folder: Path, _: Answer) -> str:
    return "has written a manifest" if (folder / "tags" / "t1" / MANIFEST).exists() else ""


ATTACKS = (
    Attack("sealed", interrupted(), (2,), ("incomplete", "--force"), check=no_manifest),
    Attack("sealed by force", interrupted("--force"), (0,)),
)

if __name__ == "__main__":
    main(ATTACKS)
