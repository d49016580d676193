# SPDX-License-Identifier: Apache-2.0
"""Tags with the largest sequence number that a manifest can have.

The next tag would get a number that no manifest can hold, and a save that finds this out at its end
has written everything in vain.  zero8 must say so before the save, or not believe the number.
"""

import json
from pathlib import Path

from attack import IN_BLOCK, Attack, checkpoint, made, main, saving, sealed, whole
from child_process import Answer

from zero8.files.manifest import MANIFEST, MARKER, Manifest
from zero8.files.tags import verify

LAST = 2**63 - 1


def complete(folder: Path) -> None:
    planted = sealed(folder / "tags" / "planted")
    manifest = Manifest(LAST, 0, Manifest.read(planted).files)  # `of` may refuse the number
    (planted / MANIFEST).write_text(manifest.text())


def incomplete(folder: Path) -> None:
    marker = made(folder / "tags" / "planted") / MARKER
    marker.write_text(json.dumps({"sequence": LAST, "note": ""}))


def beside(plant, line):
    """Return what plants the tag beside a good one, and returns a command on that folder."""

    def both(folder: Path) -> list[str]:
        sealed(folder / "tags" / "good")
        plant(folder)
        return line(folder / "tags")

    return both


def save(tags: Path) -> list[str]:
    return saving(tags, "new")


def seal(tags: Path) -> list[str]:
    return checkpoint("seal", whole(tags / "new"))


def verify_planted(tags: Path) -> list[str]:
    return checkpoint("verify", tags / "planted")


def whole_or_refused(folder: Path, answer: Answer) -> str:
    if answer.status == 0:
        verify(folder / "tags" / "new")
        return ""
    if IN_BLOCK in answer.text:
        return "refuses after the block has been entered"
    return "" if "planted" in answer.text else "refuses, and does not name the planted tag"


ATTACKS = (
    *(
        Attack(
            f"{plant.__name__} tag, {line.__name__}",
            beside(plant, line),
            (0, 1, 2),
            stays=("tags/good", "tags/planted"),
            check=whole_or_refused,
        )
        for plant in (complete, incomplete)
        for line in (save, seal)
    ),
    Attack("complete tag, verify", beside(complete, verify_planted), (1,), (MANIFEST,)),
)

if __name__ == "__main__":
    main(ATTACKS)
